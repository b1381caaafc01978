-- Sent by storage.maintenance.cold_archive.pack_rows.alone. No parameters.

SELECT pg_advisory_unlock(1919905650 /* LOCK_ARCHIVE */)
