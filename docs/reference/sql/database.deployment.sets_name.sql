-- Sent by storage.database.deployment._rename. No parameters.

SELECT pg_advisory_xact_lock(1919905649 /* LOCK_DEPLOYMENT */)
