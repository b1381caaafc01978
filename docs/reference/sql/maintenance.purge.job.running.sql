-- Sent by storage.maintenance.purge.job.running. No parameters.

SELECT l.objid::int
FROM pg_locks l
JOIN pg_database d ON d.oid = l.database
WHERE d.datname = current_database() AND l.locktype = 'advisory'
    AND l.classid = 1919905646 /* LOCK_PURGE */ AND l.objsubid = 2 AND l.granted
