-- A ledger that the release with schema 3 wrote, as `.dump` shows it.
PRAGMA application_id = 1818324329;
PRAGMA user_version = 3;
BEGIN TRANSACTION;
CREATE TABLE checkpoint (
    seq INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    path TEXT NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "checkpoint" VALUES(38,1,1,'checkpoints/step-1',0);
CREATE TABLE evaluation (
    seq INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    step INTEGER NOT NULL,
    num_prompts INTEGER NOT NULL,
    accuracy REAL NOT NULL,
    rl_s REAL NOT NULL
);
INSERT INTO "evaluation" VALUES(49,1,1,8,0.5,3.0);
CREATE TABLE event (
    seq INTEGER PRIMARY KEY,      -- 1, 2, 3, ... without a gap
    wall REAL NOT NULL,           -- seconds since 1970
    mono REAL NOT NULL,           -- monotonic seconds of `host`
    host TEXT NOT NULL,
    kind TEXT NOT NULL,           -- the event's tag
    subject TEXT NOT NULL,        -- trajectory, part or version it is about
    body TEXT NOT NULL,           -- the event as JSON
    hash BLOB NOT NULL
);
INSERT INTO "event" VALUES(1,1700000000.0,1.0,'host-1','runstarted','','{"event":"runstarted","incarnation":1,"host":"host-1","pid":7,"schema":3,"config_digest":"c0","drain":false,"max_staleness":3,"resumed_step":null}',X'4707176A7E717D2571095E9E0522A2FE');
INSERT INTO "event" VALUES(2,1700000000.25,2.0,'host-1','versionpublished','version-0','{"event":"versionpublished","version":0,"step":0,"incarnation":1,"parent":null,"digest":"digest0","num_bytes":10,"stall_s":0.1}',X'3E2E1F08E79F0197E4677F8D90962B33');
INSERT INTO "event" VALUES(3,1700000000.5,3.0,'host-1','versionpublished','version-1','{"event":"versionpublished","version":1,"step":1,"incarnation":1,"parent":null,"digest":"digest1","num_bytes":10,"stall_s":0.1}',X'0C7585D274F5C68902AE166990AEA01C');
INSERT INTO "event" VALUES(4,1700000000.75,4.0,'host-1','partstarted','replica-0','{"event":"partstarted","part":"replica-0","pid":11}',X'A5EB2B8DFEF779DB486E2DD2FC6D0641');
INSERT INTO "event" VALUES(5,1700000001.0,5.0,'host-1','versionloaded','replica-0','{"event":"versionloaded","replica":0,"version":1,"digest":"digest1","elapsed_s":0.1,"checksum":null}',X'B82B0411BAAA52DBF3155EE37C2712B3');
INSERT INTO "event" VALUES(6,1700000001.25,6.0,'host-1','issued','g0.0','{"event":"issued","trajectory_id":"g0.0","group_id":"g0","prompt_id":"p0","prompt_index":0,"sample_index":0,"kind":"train"}',X'BCCCC0843623910B72A16957B1BFECAA');
INSERT INTO "event" VALUES(7,1700000001.5,7.0,'host-1','assigned','g0.0','{"event":"assigned","trajectory_id":"g0.0","replica":0,"epoch":1,"length":0}',X'94448385F84EBEDC914CE5490E217B72');
INSERT INTO "event" VALUES(8,1700000001.75,8.0,'host-1','finished','g0.0','{"event":"finished","trajectory_id":"g0.0","epoch":1,"finish_reason":"stop","spans":[[0,0,3,null],[1,3,5,null]],"length":5,"digest":"1513cf220e7df418c4d9600604434fac","queue_s":0.1,"generate_s":0.2}',X'863C7D8B1A313F468A9DD0A26EF2A5D8');
INSERT INTO "event" VALUES(9,1700000002.0,9.0,'host-1','scored','g0.0','{"event":"scored","trajectory_id":"g0.0","reward":1.0,"elapsed_s":0.01}',X'4B05FAE46179F319005321C9EC48D6D5');
INSERT INTO "event" VALUES(10,1700000002.25,10.0,'host-1','ready','g0.0','{"event":"ready","trajectory_id":"g0.0","advantage":0.5,"advantage_scale":1.0}',X'A28923A596DEC14982B44FBC45D80A2E');
INSERT INTO "event" VALUES(11,1700000002.5,11.0,'host-1','issued','g0.1','{"event":"issued","trajectory_id":"g0.1","group_id":"g0","prompt_id":"p0","prompt_index":0,"sample_index":1,"kind":"train"}',X'EB55BDEAA78C950CA57152276634256D');
INSERT INTO "event" VALUES(12,1700000002.75,12.0,'host-1','assigned','g0.1','{"event":"assigned","trajectory_id":"g0.1","replica":0,"epoch":1,"length":0}',X'117C1B78B0BCB848DE6785D55BBC514B');
INSERT INTO "event" VALUES(13,1700000003.0,13.0,'host-1','finished','g0.1','{"event":"finished","trajectory_id":"g0.1","epoch":1,"finish_reason":"stop","spans":[[0,0,3,null],[1,3,5,null]],"length":5,"digest":"e7c4ac6c69a941ac89e9fe973d432765","queue_s":0.1,"generate_s":0.2}',X'11CE7112AB64718E5A46A3807D8CCC2F');
INSERT INTO "event" VALUES(14,1700000003.25,14.0,'host-1','scored','g0.1','{"event":"scored","trajectory_id":"g0.1","reward":1.0,"elapsed_s":0.01}',X'DD5BFBE66EE4B36C0D65092C459B4C46');
INSERT INTO "event" VALUES(15,1700000003.5,15.0,'host-1','ready','g0.1','{"event":"ready","trajectory_id":"g0.1","advantage":0.5,"advantage_scale":1.0}',X'105D6C4ED2882D2A096E0E98B5926C12');
INSERT INTO "event" VALUES(16,1700000003.75,16.0,'host-1','issued','g1.0','{"event":"issued","trajectory_id":"g1.0","group_id":"g1","prompt_id":"p1","prompt_index":1,"sample_index":0,"kind":"train"}',X'A4C02BF16A088D28BDC608B08E064E4E');
INSERT INTO "event" VALUES(17,1700000004.0,17.0,'host-1','assigned','g1.0','{"event":"assigned","trajectory_id":"g1.0","replica":0,"epoch":1,"length":0}',X'D2B49C521014F718C79CC566578A5979');
INSERT INTO "event" VALUES(18,1700000004.25,18.0,'host-1','finished','g1.0','{"event":"finished","trajectory_id":"g1.0","epoch":1,"finish_reason":"stop","spans":[[0,0,3,null],[1,3,5,null]],"length":5,"digest":"e7c4ac6c69a941ac89e9fe973d432765","queue_s":0.1,"generate_s":0.2}',X'2EA11A0F9F9C38B829BE0E20567EC53B');
INSERT INTO "event" VALUES(19,1700000004.5,19.0,'host-1','scored','g1.0','{"event":"scored","trajectory_id":"g1.0","reward":1.0,"elapsed_s":0.01}',X'51C7CD1C957B6D14A1AC969433543690');
INSERT INTO "event" VALUES(20,1700000004.75,20.0,'host-1','ready','g1.0','{"event":"ready","trajectory_id":"g1.0","advantage":0.5,"advantage_scale":1.0}',X'5B59B25EF3882C90C7E32C5E1E854023');
INSERT INTO "event" VALUES(21,1700000005.0,21.0,'host-1','issued','g2.0','{"event":"issued","trajectory_id":"g2.0","group_id":"g2","prompt_id":"p2","prompt_index":2,"sample_index":0,"kind":"train"}',X'C775175C1F10C9A83A018E548FE98947');
INSERT INTO "event" VALUES(22,1700000005.25,22.0,'host-1','assigned','g2.0','{"event":"assigned","trajectory_id":"g2.0","replica":0,"epoch":1,"length":0}',X'694A8A9ADB5F8B3F9A4ECC482A890F20');
INSERT INTO "event" VALUES(23,1700000005.5,23.0,'host-1','interrupted','g2.0','{"event":"interrupted","trajectory_id":"g2.0","epoch":1,"length":3,"reason":"replica_died"}',X'0CC0003EBD2EFFB00F2BA639983CDA2E');
INSERT INTO "event" VALUES(24,1700000005.75,24.0,'host-1','assigned','g2.0','{"event":"assigned","trajectory_id":"g2.0","replica":1,"epoch":2,"length":3}',X'99F1DA972729A790E8EE8CF2779662F9');
INSERT INTO "event" VALUES(25,1700000006.0,25.0,'host-1','cut','g2.0','{"event":"cut","trajectory_id":"g2.0","cap":"tokens","value":5}',X'65D52452EB74DA15C80722BEECC8FADF');
INSERT INTO "event" VALUES(26,1700000006.25,26.0,'host-1','finished','g2.0','{"event":"finished","trajectory_id":"g2.0","epoch":2,"finish_reason":"stop","spans":[[0,0,5,null]],"length":5,"digest":"b995daab737b6ca6521dbeddf7274967","queue_s":0.1,"generate_s":0.2}',X'F934091B987B415444E4B4537D30FD6C');
INSERT INTO "event" VALUES(27,1700000006.5,27.0,'host-1','scored','g2.0','{"event":"scored","trajectory_id":"g2.0","reward":1.0,"elapsed_s":0.01}',X'6F2FDE748861691A2798CFDF311A237A');
INSERT INTO "event" VALUES(28,1700000006.75,28.0,'host-1','ready','g2.0','{"event":"ready","trajectory_id":"g2.0","advantage":0.5,"advantage_scale":1.0}',X'15A66A334421FA7650869FEFA2F51CFB');
INSERT INTO "event" VALUES(29,1700000007.0,29.0,'host-1','issued','e0.0','{"event":"issued","trajectory_id":"e0.0","group_id":"e0","prompt_id":"p90","prompt_index":90,"sample_index":0,"kind":"eval"}',X'D8D9416148F5BFCCDC3DDA41F7A5B085');
INSERT INTO "event" VALUES(30,1700000007.25,30.0,'host-1','assigned','e0.0','{"event":"assigned","trajectory_id":"e0.0","replica":0,"epoch":1,"length":0}',X'10B86CAEBB8476B9D725E2F8047B350C');
INSERT INTO "event" VALUES(31,1700000007.5,31.0,'host-1','finished','e0.0','{"event":"finished","trajectory_id":"e0.0","epoch":1,"finish_reason":"stop","spans":[[0,0,5,null]],"length":5,"digest":"3e7d0958c7d954e846ab1575ea95bfb4","queue_s":0.1,"generate_s":0.2}',X'7706EBE00F951FF93D6804BAAF74E4D7');
INSERT INTO "event" VALUES(32,1700000007.75,32.0,'host-1','scored','e0.0','{"event":"scored","trajectory_id":"e0.0","reward":1.0,"elapsed_s":0.01}',X'F31907187BF97A0CFED6CEFA7084974D');
INSERT INTO "event" VALUES(33,1700000008.0,33.0,'host-1','ready','e0.0','{"event":"ready","trajectory_id":"e0.0","advantage":0.5,"advantage_scale":1.0}',X'9754F46799E7A6EDB19C327BBB72652B');
INSERT INTO "event" VALUES(34,1700000008.25,34.0,'host-1','consumed','e0.0','{"event":"consumed","trajectory_id":"e0.0","step":-1,"version":1,"staleness":1,"weight":1.0}',X'828903A2EE81D6603970D355F088D00D');
INSERT INTO "event" VALUES(35,1700000008.5,35.0,'host-1','stepped','step-1','{"event":"stepped","step":1,"incarnation":1,"num_trajectories":2,"num_tokens":10,"loss":0.1,"grad_norm":0.2,"reward":1.0,"elapsed_s":0.3}',X'E3B2D2C5523B0F95B47CB54D6CAB2FBC');
INSERT INTO "event" VALUES(36,1700000008.75,36.0,'host-1','consumed','g0.0','{"event":"consumed","trajectory_id":"g0.0","step":1,"version":1,"staleness":1,"weight":1.0}',X'D5B5B3B7EE6C10F1C842CEDA0BDD5103');
INSERT INTO "event" VALUES(37,1700000009.0,37.0,'host-1','consumed','g0.1','{"event":"consumed","trajectory_id":"g0.1","step":1,"version":1,"staleness":1,"weight":1.0}',X'A7FA805F32DC29BB0846D073F253DF08');
INSERT INTO "event" VALUES(38,1700000009.25,38.0,'host-1','checkpointed','step-1','{"event":"checkpointed","step":1,"version":1,"path":"checkpoints/step-1","stall_s":0.1,"elapsed_s":0.4}',X'F237F2F4E4FD17F3BB8BD270A503D2E7');
INSERT INTO "event" VALUES(39,1700000009.5,39.0,'host-1','stepped','step-2','{"event":"stepped","step":2,"incarnation":1,"num_trajectories":1,"num_tokens":5,"loss":0.1,"grad_norm":0.2,"reward":1.0,"elapsed_s":0.3}',X'A609545BF4FDDB92C35467899BB4C492');
INSERT INTO "event" VALUES(40,1700000009.75,40.0,'host-1','consumed','g1.0','{"event":"consumed","trajectory_id":"g1.0","step":2,"version":1,"staleness":1,"weight":1.0}',X'F3AFFDD4B809C8EE3F8A57888E51A15F');
INSERT INTO "event" VALUES(41,1700000010.0,41.0,'host-1','rolledback','step-1','{"event":"rolledback","step":1,"reason":"learner_died"}',X'0CDA7B803B9FB6B731BB1FF959C775FB');
INSERT INTO "event" VALUES(42,1700000010.25,42.0,'host-1','undone','g1.0','{"event":"undone","trajectory_id":"g1.0","step":2}',X'0368C6169122DD7C78E3CDE2378C1892');
INSERT INTO "event" VALUES(43,1700000010.5,43.0,'host-1','dropped','g2.0','{"event":"dropped","trajectory_id":"g2.0","reason":"stale","detail":"staleness 4"}',X'C1919E2B9839D5971D920D35108C166F');
INSERT INTO "event" VALUES(44,1700000010.75,44.0,'host-1','issued','g3.0','{"event":"issued","trajectory_id":"g3.0","group_id":"g3","prompt_id":"p3","prompt_index":3,"sample_index":0,"kind":"train"}',X'B570E0C9BD646BF2248C64B77AE305D5');
INSERT INTO "event" VALUES(45,1700000011.0,45.0,'host-1','assigned','g3.0','{"event":"assigned","trajectory_id":"g3.0","replica":0,"epoch":1,"length":0}',X'10ACAC458CC61020FAFCDF1AFAD81DEA');
INSERT INTO "event" VALUES(46,1700000011.25,46.0,'host-1','streamcut','g3.0','{"event":"streamcut","trajectory_id":"g3.0","replica":0,"length":4}',X'A04D47880F8BF0A147FB7A8E19183E30');
INSERT INTO "event" VALUES(47,1700000011.5,47.0,'host-1','restamped','g3.0','{"event":"restamped","trajectory_id":"g3.0","spans":[[0,0,1,null],[1,1,4,null]]}',X'E0481A5FBF90A2D2F7E3A95744917D80');
INSERT INTO "event" VALUES(48,1700000011.75,48.0,'host-1','issued','g3.1','{"event":"issued","trajectory_id":"g3.1","group_id":"g3","prompt_id":"p3","prompt_index":3,"sample_index":1,"kind":"train"}',X'6EAB1038460A8B37847FD261832FFDCD');
INSERT INTO "event" VALUES(49,1700000012.0,49.0,'host-1','evaluated','version-1','{"event":"evaluated","version":1,"step":1,"num_prompts":8,"accuracy":0.5,"rl_s":3.0}',X'7AF2C5D2B19B98534BEB3992C88AAE89');
CREATE TABLE head (               -- one row: the last event of the chain
    seq INTEGER NOT NULL,
    hash BLOB NOT NULL
);
INSERT INTO "head" VALUES(49,X'7AF2C5D2B19B98534BEB3992C88AAE89');
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
);
INSERT INTO "incarnation" VALUES(1,1,'host-1',7,'c0',0,3,NULL,NULL);
CREATE TABLE prompt (
    id TEXT PRIMARY KEY,
    idx INTEGER NOT NULL,         -- place in the stream when it was first issued
    ids BLOB NOT NULL,            -- [P] little-endian int32
    text TEXT NOT NULL,
    answer TEXT NOT NULL,
    digest BLOB NOT NULL
) WITHOUT ROWID;
INSERT INTO "prompt" VALUES('p0',0,X'020000000300000004000000','prompt 0','4',X'0043BD89A1179147115844C320FD5C16');
INSERT INTO "prompt" VALUES('p1',1,X'020000000300000004000000','prompt 1','4',X'B8D78AC762F74F94311091B32771C4FE');
INSERT INTO "prompt" VALUES('p2',2,X'020000000300000004000000','prompt 2','4',X'F1B78CF186550B1292841CBCFD348C85');
INSERT INTO "prompt" VALUES('p3',3,X'020000000300000004000000','prompt 3','4',X'B5170C527D2EECC911C4364E1CCE864C');
INSERT INTO "prompt" VALUES('p90',90,X'020000000300000004000000','prompt 90','4',X'DDF3E6B5D7790786A9CEA5DCFC6B0CF5');
CREATE TABLE segment (            -- appended as a response grows; moved to Parquet once it cannot be needed
    trajectory INTEGER NOT NULL,
    start INTEGER NOT NULL,
    spans TEXT NOT NULL,
    ids BLOB NOT NULL,            -- [n] little-endian int32
    logprobs BLOB NOT NULL,       -- [n] little-endian float32
    mask BLOB,                    -- sampling mask of n rows, as `recording.pack_mask` has it; NULL: not recorded
    experts BLOB,                 -- routed experts, as `recording.pack_experts` has them, of positions of their own
    digest BLOB NOT NULL
);
INSERT INTO "segment" VALUES(1,0,'[[0,0,3,null]]',X'61000000280000002A000000',X'BE3852BFA984FFBE6A6FA2BE',X'0300000005000000010278016362626C496CD1D0626660666000000F2701C7',X'0000000003000200010001020304050708090A0B0C0E0F1011121315161718191A1C1D1E1F2021',X'C0C2B353B2F92EEB833C60FA4F54C80E');
INSERT INTO "segment" VALUES(1,3,'[[1,3,5,null]]',X'2E00000002000000',X'921E75BF899163BF',X'02000000050000000102780163626ED16B6965626660666600000EF801CC',X'0500000003000200012324252627282A2B2C2D2E2F',X'DFFB31FAFC77CA0E9C33EE1F685068EC');
INSERT INTO "segment" VALUES(2,0,'[[0,0,3,null]]',X'460000001800000035000000',X'18AB6ABF45842EBFB2146CBF',NULL,NULL,X'C41107CE451BD4F12070D07288C66DC8');
INSERT INTO "segment" VALUES(2,3,'[[1,3,5,null]]',X'1F00000058000000',X'6B03EEBED8AF0FBE',NULL,NULL,X'B498CA827B5975D06998E3AF8679D5FD');
INSERT INTO "segment" VALUES(3,0,'[[0,0,3,null]]',X'460000001800000035000000',X'18AB6ABF45842EBFB2146CBF',NULL,NULL,X'46D2C4EB96394E41CE5DDED4E25F0388');
INSERT INTO "segment" VALUES(3,3,'[[1,3,5,null]]',X'1F00000058000000',X'6B03EEBED8AF0FBE',NULL,NULL,X'A8F417F185388791C86B9F92433283EC');
INSERT INTO "segment" VALUES(4,0,'[[0,0,3,null]]',X'1E0000004B00000018000000',X'DB5401BD3FC76FBF6312EBBE',X'03000000030000000101780163646494F3960000011D0085',X'0000000003000200010001020304050708090A0B0C0E0F1011121315161718191A1C1D1E1F2021',X'E4A81944032172D3E420423E1F54D9C6');
INSERT INTO "segment" VALUES(4,3,'[[0,3,5,null]]',X'490000000B000000',X'CF0DBFBD780B56BE',X'02000000050000000102780163626EF16C69E566666066660000102101F0',X'0500000003000200012324252627282A2B2C2D2E2F',X'60B104E15D503AF6D66F9BE4E5DED98D');
INSERT INTO "segment" VALUES(5,0,'[[0,0,5,null]]',X'590000002E00000040000000560000005F000000',X'0F2D4DBFF140A5BD7F7019BF07C314BF3D8CB6BD',NULL,NULL,X'B014D14C7C6D42872BA25ECEB66FE596');
INSERT INTO "segment" VALUES(6,0,'[[1,0,4,null]]',X'33000000400000005A00000048000000',X'36DA67BEB9740BBF6AE718BDCB9DB9BC',NULL,NULL,X'C1D724022A888E68487A76540E2AAED5');
CREATE TABLE step (
    seq INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    num_trajectories INTEGER NOT NULL,
    num_tokens INTEGER NOT NULL,
    loss REAL NOT NULL,
    grad_norm REAL NOT NULL,
    reward REAL NOT NULL,
    elapsed_s REAL NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
);
INSERT INTO "step" VALUES(35,1,1,2,10,0.1,0.2,1.0,0.3,0);
INSERT INTO "step" VALUES(39,2,1,1,5,0.1,0.2,1.0,0.3,1);
CREATE TABLE token_reward (
    trajectory INTEGER PRIMARY KEY,
    rewards BLOB NOT NULL         -- [L] little-endian float32
);
INSERT INTO "token_reward" VALUES(6,X'36DA67BEB9740BBF6AE718BDCB9DB9BC');
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
    length INTEGER NOT NULL,      -- response tokens stored
    oldest_version INTEGER,
    newest_version INTEGER,
    spans TEXT,                   -- JSON [[version, start, end, kv_version], ...], once finished or restamped
    restamped INTEGER,            -- leading tokens for which `spans` hold, and not those of their segments
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
    weight REAL
);
INSERT INTO "trajectory" VALUES(1,'g0.0','g0','p0',0,0,'train','consumed',6,36,1,0,5,0,1,'[[0,0,3,null],[1,3,5,null]]',NULL,'stop','1513cf220e7df418c4d9600604434fac',0.1,0.2,NULL,1.0,0.5,1.0,NULL,NULL,1,1,1,1.0);
INSERT INTO "trajectory" VALUES(2,'g0.1','g0','p0',0,1,'train','consumed',11,37,1,0,5,0,1,'[[0,0,3,null],[1,3,5,null]]',NULL,'stop','e7c4ac6c69a941ac89e9fe973d432765',0.1,0.2,NULL,1.0,0.5,1.0,NULL,NULL,1,1,1,1.0);
INSERT INTO "trajectory" VALUES(3,'g1.0','g1','p1',1,0,'train','ready',16,42,1,0,5,0,1,'[[0,0,3,null],[1,3,5,null]]',NULL,'stop','e7c4ac6c69a941ac89e9fe973d432765',0.1,0.2,NULL,1.0,0.5,1.0,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "trajectory" VALUES(4,'g2.0','g2','p2',2,0,'train','dropped',21,43,2,1,5,0,0,'[[0,0,5,null]]',NULL,'stop','b995daab737b6ca6521dbeddf7274967',0.1,0.2,'tokens',1.0,0.5,1.0,'stale','staleness 4',NULL,NULL,NULL,NULL);
INSERT INTO "trajectory" VALUES(5,'e0.0','e0','p90',90,0,'eval','consumed',29,34,1,0,5,0,0,'[[0,0,5,null]]',NULL,'stop','3e7d0958c7d954e846ab1575ea95bfb4',0.1,0.2,NULL,1.0,0.5,1.0,NULL,NULL,-1,1,1,1.0);
INSERT INTO "trajectory" VALUES(6,'g3.0','g3','p3',3,0,'train','running',44,47,1,0,4,0,1,'[[0,0,1,null],[1,1,4,null]]',4,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
INSERT INTO "trajectory" VALUES(7,'g3.1','g3','p3',3,1,'train','queued',48,48,0,NULL,0,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL,NULL);
CREATE TABLE version (
    seq INTEGER PRIMARY KEY,
    version INTEGER NOT NULL UNIQUE,
    step INTEGER NOT NULL,
    incarnation INTEGER NOT NULL,
    parent INTEGER,
    digest TEXT NOT NULL,
    num_bytes INTEGER NOT NULL,
    stall_s REAL NOT NULL
);
INSERT INTO "version" VALUES(2,0,0,1,NULL,'digest0',10,0.1);
INSERT INTO "version" VALUES(3,1,1,1,NULL,'digest1',10,0.1);
CREATE INDEX segment_of ON segment (trajectory);
COMMIT;
