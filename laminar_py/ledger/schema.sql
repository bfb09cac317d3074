-- The ledger of one run. `event` is the truth and is only ever appended to; every other table is kept in the
-- same transaction as the events it follows from, so that readers need not replay.

CREATE TABLE head (               -- one row: the last event of the chain
    seq INTEGER NOT NULL,
    hash BLOB NOT NULL
) STRICT;
CREATE TABLE event (
    seq INTEGER PRIMARY KEY,      -- 1, 2, 3, ... without a gap
    wall REAL NOT NULL,           -- seconds since 1970
    mono REAL NOT NULL,           -- monotonic seconds of `host`
    host TEXT NOT NULL,
    kind TEXT NOT NULL,           -- the event's tag
    subject TEXT NOT NULL,        -- trajectory, part or version it is about
    body TEXT NOT NULL,           -- the event as JSON
    hash BLOB NOT NULL
) STRICT;
CREATE TABLE prompt (
    id TEXT PRIMARY KEY,
    idx INTEGER NOT NULL,         -- place in the stream when it was first issued
    ids BLOB NOT NULL,            -- [P] little-endian int32
    text TEXT NOT NULL,
    answer TEXT NOT NULL,
    task TEXT NOT NULL,
    fields BLOB NOT NULL,         -- what its line has besides, as a JSON object
    digest BLOB NOT NULL
) WITHOUT ROWID, STRICT;
CREATE TABLE trajectory (         -- columns in the order of the fields of `rows.TrajectoryRow`
    number INTEGER PRIMARY KEY,   -- 1, 2, 3, ... in the order of issue
    id TEXT NOT NULL UNIQUE,
    group_id TEXT NOT NULL,
    prompt_id TEXT NOT NULL,
    prompt_index INTEGER NOT NULL,
    sample_index INTEGER NOT NULL,
    kind TEXT NOT NULL,
    status TEXT NOT NULL,
    first_seq INTEGER NOT NULL,   -- its first and last event
    last_seq INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    replica INTEGER,
    length INTEGER NOT NULL,      -- response tokens that a reference was stored of
    oldest_version INTEGER,
    newest_version INTEGER,
    spans TEXT,                   -- JSON [[version, start, end, kv_version], ...], once finished or restamped
    restamped INTEGER,            -- leading tokens for which `spans` hold, and not those of their pieces
    finish_reason TEXT,
    digest TEXT,                  -- of the finished response
    queue_s REAL,
    generate_s REAL,
    cap TEXT,                     -- the cap that cut it, if any
    reward REAL,
    advantage REAL,
    advantage_scale REAL,
    drop_reason TEXT,
    drop_detail TEXT,
    step INTEGER,                 -- the learner step that consumed it, and the version it was at
    version INTEGER,
    staleness INTEGER,
    weight REAL,
    score_s REAL,                 -- that its reward took
    scorer_s REAL,                -- of a scorer's time, which scores several at once
    issued_s REAL,                -- this and what follows: seconds since 1970, by the clock of `machine.RunClock`
    started_s REAL,               -- first handed to a replica
    finished_s REAL,
    scored_s REAL,
    ready_s REAL,                 -- its group was complete
    ended_s REAL                  -- consumed or dropped
) STRICT;
CREATE TABLE piece (              -- where the tokens and columns of a trajectory lie
    trajectory INTEGER NOT NULL,
    name TEXT NOT NULL,           -- of a column, see `records.columns`; empty: response tokens
    dtype TEXT NOT NULL,          -- of a column
    start INTEGER NOT NULL,       -- response tokens [start, end)
    end INTEGER NOT NULL,
    spans TEXT NOT NULL,          -- of the tokens, as the engine had said; JSON
    routed INTEGER NOT NULL,      -- leading positions of prompt and response whose experts are recorded with it
    segment TEXT NOT NULL,        -- file, and where in it; `segments.frames` has the bytes
    offset INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL,
    digest BLOB NOT NULL
) STRICT;
CREATE INDEX piece_of ON piece (trajectory);

CREATE TABLE incarnation (
    seq INTEGER PRIMARY KEY,
    incarnation INTEGER NOT NULL UNIQUE,
    host TEXT NOT NULL,
    pid INTEGER NOT NULL,
    config_digest TEXT NOT NULL,
    drain INTEGER NOT NULL,
    max_staleness INTEGER,
    resumed_step INTEGER,
    ended TEXT                    -- why, if it ended by itself
) STRICT;
CREATE TABLE version (
    seq INTEGER PRIMARY KEY,
    version INTEGER NOT NULL UNIQUE,
    step INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    parent INTEGER,
    digest TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    stall_s REAL NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE step (
    seq INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    num_trajectories INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    loss REAL,                    -- this and the next are NULL if it trained nothing
    grad_norm REAL,
    reward REAL,                  -- NULL if nothing was scored since the step before
    elapsed_s REAL NOT NULL,
    waited_s REAL NOT NULL,
    reference_s REAL NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE replay (             -- a row for each time that a step trained on a consumed trajectory again
    seq INTEGER PRIMARY KEY,
    trajectory TEXT NOT NULL,     -- id
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,     -- of the learner before the step
    staleness INTEGER NOT NULL,
    weight REAL NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE checkpoint (
    seq INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    path TEXT NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE TABLE evaluation (         -- all of its figures are in its event
    seq INTEGER PRIMARY KEY,
    pass_id TEXT NOT NULL UNIQUE, -- group of its trajectories
    set_name TEXT NOT NULL,
    version INTEGER NOT NULL,
    step INTEGER NOT NULL,
    rl_s REAL NOT NULL,
    problems INTEGER NOT NULL,
    samples INTEGER NOT NULL,     -- of each problem
    mean REAL NOT NULL            -- reward
) STRICT;
