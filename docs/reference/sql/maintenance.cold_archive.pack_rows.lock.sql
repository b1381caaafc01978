-- Sent by storage.maintenance.cold_archive.pack_rows.alone. No parameters.

SELECT pg_try_advisory_lock(1919905650 /* LOCK_ARCHIVE */)
