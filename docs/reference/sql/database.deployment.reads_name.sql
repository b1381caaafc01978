-- Sent by storage.database.deployment.settled. No parameters.

SELECT pg_advisory_xact_lock_shared(1919905649 /* LOCK_DEPLOYMENT */)
