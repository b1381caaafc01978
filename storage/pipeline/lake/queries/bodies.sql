-- The same text several times on one day, with an event that has it.
SELECT day, example, times, senders, rooms
FROM {daily_bodies}
ORDER BY times DESC, day DESC, example
