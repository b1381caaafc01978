-- Sent by storage.queries.auth_chain.auth_chain_ids and
-- storage.queries.auth_chain.state_and_chain_ids. Parameters: $1 text, $2 text.

WITH RECURSIVE
given AS MATERIALIZED (  -- by number, or by id
    SELECT $2::text::bigint[] || ARRAY(
        SELECT e.event_nid
        -- one by one: a bitmap of a hash index compares each row with all ids
        FROM (SELECT unnest($1::text::text[]) AS given_id) AS wanted  -- no tuple store
        CROSS JOIN LATERAL (SELECT event_nid FROM events WHERE event_id = given_id OFFSET 0) AS e
    ) AS nids
),
placed AS MATERIALIZED (
    SELECT event_nid, COALESCE(chain_nid, -event_nid) AS chain_nid, sequence_number, link_1, link_2
    FROM auth_chains
    WHERE event_nid = ANY((SELECT nids FROM given)::bigint[])
),
counted AS MATERIALIZED (SELECT count(*)::int AS placed FROM placed),
own AS (  -- of each chain the last given position
    SELECT chain_nid, max(sequence_number) AS sequence_number
    FROM placed
    GROUP BY chain_nid
),
later AS MATERIALIZED (  -- the same without first events, in order of the chains
    SELECT chain_nid, max(sequence_number) AS sequence_number
    FROM (
        SELECT chain_nid, sequence_number
        FROM placed
        WHERE sequence_number > 1
        ORDER BY chain_nid DESC  -- as the index has them
    ) AS p
    GROUP BY chain_nid
),
long AS MATERIALIZED (  -- chains with more before it than a first event without a number
    SELECT chain_nid, sequence_number
    FROM later
    WHERE sequence_number > CASE WHEN chain_nid < 0 THEN 2 ELSE 1 END
    ORDER BY chain_nid DESC
),
earlier AS (  -- the events before, of these chains
    SELECT a.*
    FROM long o
    CROSS JOIN LATERAL (SELECT event_nid, event_id, link_1, link_2 FROM auth_chains
        WHERE chain_nid = o.chain_nid AND sequence_number < o.sequence_number OFFSET 0) AS a
    UNION ALL
    SELECT a.event_nid, a.event_id, a.link_1, a.link_2
    FROM auth_chains a
    WHERE a.event_nid = ANY(ARRAY(SELECT -chain_nid FROM later)) AND a.chain_nid IS NULL
),
links AS MATERIALIZED (  -- by target, as few chains are the targets of most links; with the ids
    SELECT (link_1 >> 32) - event_nid AS target_1, max(link_1 & 4294967295) AS number_1,
        (link_2 >> 32) - event_nid AS target_2, max(link_2 & 4294967295) AS number_2,
        NULL::json AS event_ids
    FROM placed
    GROUP BY target_1, target_2
    UNION ALL
    SELECT (link_1 >> 32) - event_nid AS target_1, max(link_1 & 4294967295),
        (link_2 >> 32) - event_nid AS target_2, max(link_2 & 4294967295), json_agg(event_id)
    FROM earlier
    GROUP BY target_1, target_2
),
loose AS (  -- given events without a position, and those that they reach through such events only
    SELECT e.event_nid, auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4) AS auth_events, true AS is_given
    FROM events e
    WHERE e.event_nid = ANY(
        CASE
            WHEN (SELECT cardinality(nids) FROM given) = (SELECT placed FROM counted) THEN '{}'
            ELSE ARRAY(
                SELECT unnest(nids) FROM given
                EXCEPT
                SELECT event_nid FROM auth_chains
                    WHERE event_nid = ANY((SELECT nids FROM given)::bigint[])
            )
        END
    )
    UNION
    SELECT e.event_nid, auth_nids(e.event_nid, e.auth_events, e.auth_distance_1, e.auth_distance_2, e.auth_distance_3, e.auth_distance_4) AS auth_events, false
    FROM loose l
    CROSS JOIN unnest(l.auth_events) AS parent (event_nid)
    -- one by one, also below: a join could read all events or chains
    CROSS JOIN LATERAL (SELECT * FROM events WHERE event_nid = parent.event_nid OFFSET 0) AS e
    WHERE (SELECT true FROM auth_chains p WHERE p.event_nid = parent.event_nid) IS NULL
),
-- the targets of the links of these chains, and of the auth events of the loose events
first AS MATERIALIZED (
    SELECT chain_nid, max(sequence_number)::int AS sequence_number
    FROM (
        SELECT t.chain, t.upto
        FROM links
        CROSS JOIN LATERAL (VALUES (target_1, number_1), (target_2, number_2)) AS t (chain, upto)
        WHERE t.chain IS NOT NULL
        UNION ALL
        SELECT l.target_chain_nid, l.target_sequence_number
        FROM auth_chain_links l
        JOIN own o USING (chain_nid)
        WHERE l.chain_nid = ANY(
            -- few chains have links there, if any
            CASE WHEN EXISTS (SELECT FROM auth_chain_links)
                THEN ARRAY(SELECT chain_nid FROM own) ELSE '{}' END
        ) AND l.sequence_number <= o.sequence_number
        UNION ALL
        SELECT COALESCE(p.chain_nid, -p.event_nid), p.sequence_number
        FROM loose w
        CROSS JOIN unnest(w.auth_events) AS parent (event_nid)
        CROSS JOIN LATERAL (SELECT chain_nid, event_nid, sequence_number FROM auth_chains
            WHERE event_nid = parent.event_nid OFFSET 0) AS p
    ) AS reached (chain_nid, sequence_number)
    GROUP BY chain_nid
),
-- the targets beyond, without positions that `first` reaches: the number of ways to those is the
-- number of power level events
reach AS (
    SELECT chain_nid, sequence_number
    FROM first
    UNION
    SELECT l.chain_nid, l.sequence_number
    FROM reach r
    CROSS JOIN LATERAL reached_from(r.chain_nid, r.sequence_number) AS l (chain_nid,
        sequence_number)
    WHERE NOT EXISTS (SELECT FROM first f
        WHERE f.chain_nid = l.chain_nid AND f.sequence_number >= l.sequence_number)
)
SELECT
    (SELECT cardinality(nids) FROM given) AS stored,
    (SELECT placed FROM counted) AS placed,
    (
        SELECT stream_id
        FROM stream_positions
        WHERE stream_name = 'caches' AND instance_name = 'maintenance'
    ) AS maintained,
    (
        SELECT json_agg(event_id)
        FROM auth_chains
        WHERE event_nid = ANY((SELECT $2::text::bigint[])::bigint[])
    )::text AS given_ids,
    (
        SELECT json_agg(event_ids) FILTER (WHERE event_ids IS NOT NULL)
        FROM links
    )::text AS own_ids,
    (
        SELECT json_agg(a.event_id)
        FROM (SELECT chain_nid, max(sequence_number) AS sequence_number FROM reach
            GROUP BY chain_nid) AS r
        CROSS JOIN LATERAL chain_rows(r.chain_nid, r.sequence_number) AS a
    )::text AS reached_ids,
    (
        SELECT json_agg(e.event_id)
        FROM loose l
        CROSS JOIN LATERAL (SELECT event_id FROM events
            WHERE event_nid = l.event_nid OFFSET 0) AS e
        WHERE NOT l.is_given
    )::text AS loose_ids
