-- Sent by storage.maintenance.purge.job.alone. Parameters: $1 int.

SELECT pg_advisory_unlock(1919905646 /* LOCK_PURGE */, $1::int)
