-- chains get the numbers, and links the rows, that the release before reads
CREATE TEMP TABLE begun ON COMMIT DROP AS
SELECT n.*
FROM (
    SELECT a.event_nid, row_number() OVER () AS place
    FROM auth_chains a
    WHERE a.chain_nid IS NULL
) AS one
CROSS JOIN LATERAL (SELECT one.event_nid, nextval('auth_chain_nids') AS chain_nid) AS n;
ALTER TABLE begun ADD PRIMARY KEY (event_nid);

INSERT INTO auth_chain_links (chain_nid, target_chain_nid, sequence_number, target_sequence_number)
SELECT COALESCE(a.chain_nid, -a.event_nid), (l.link >> 32) - a.event_nid, a.sequence_number,
    (l.link & 4294967295)::int
FROM auth_chains a
CROSS JOIN LATERAL (VALUES (a.link_1), (a.link_2)) AS l (link)
WHERE l.link IS NOT NULL;

UPDATE auth_chain_links l
SET chain_nid = b.chain_nid
FROM begun b
WHERE l.chain_nid = -b.event_nid;

UPDATE auth_chain_links l
SET target_chain_nid = b.chain_nid
FROM begun b
WHERE l.target_chain_nid = -b.event_nid;

UPDATE auth_chains a
SET chain_nid = b.chain_nid
FROM begun b
WHERE COALESCE(-a.chain_nid, a.event_nid) = b.event_nid;

CREATE OR REPLACE FUNCTION reached_from(chain_nid bigint,
    sequence_number int) RETURNS TABLE (chain_nid_reached bigint, upto int)
LANGUAGE sql STABLE ROWS 10 AS $$
    SELECT l.target_chain_nid, max(l.target_sequence_number)
    FROM auth_chain_links l
    WHERE l.chain_nid = $1 AND l.sequence_number <= $2
    GROUP BY l.target_chain_nid
    OFFSET 0
$$;

DROP FUNCTION linked_upto(bigint);
DROP FUNCTION linking_to(bigint, int);
DROP FUNCTION chain_rows_from(bigint, int);
DROP FUNCTION chain_rows(bigint, int);
DROP INDEX auth_chains_position_key;
ALTER TABLE auth_chains
    DROP COLUMN link_1,
    DROP COLUMN link_2,
    ALTER COLUMN chain_nid SET NOT NULL;
COMMENT ON TABLE auth_chains IS
    'Chain cover of the auth graph: each state event has a position in one chain, and reaches '
    'every earlier position of that chain.';
COMMENT ON CONSTRAINT auth_chains_pkey ON auth_chains IS
    'Serves: the position of an event; the ids of a state and of an auth chain.';
COMMENT ON TABLE auth_chain_links IS
    'From this position on, the chain reaches the target chain up to the target position. Only '
    'links that extend earlier ones are stored.';
COMMENT ON COLUMN auth_chains.chain_nid IS NULL;
