-- Sent by storage.maintenance.verify.run.check_archive. No parameters.

SELECT EXISTS (
    SELECT
    FROM pg_locks l
    JOIN pg_database d ON d.oid = l.database
    WHERE d.datname = current_database() AND l.locktype = 'advisory' AND l.granted
        AND l.classid = 0 AND l.objid = 1919905650 /* LOCK_ARCHIVE */ AND l.objsubid = 1
)
