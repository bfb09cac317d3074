"""Records on the wire of the relay tree, the manifest of a version, and the events that a node reports.

Nodes and subscribers send them; `relay/node.py` lists which record answers which. A record is one MessagePack
frame with a `type` field. The bytes of a chunk travel as a second frame, which saves copies.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

Version = Annotated[int, msgspec.Meta(ge=0)]
Index = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
MIN_CHUNK_BYTES = 4096  # a node keeps a byte of state per chunk
ChunkBytes = Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES)]
# A name from the wire becomes a file name, so the pattern admits none that leaves the folder.
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]*\Z", max_length=100)]
# A version has no file with a name that the store uses, such as `manifest.json`.
_FILE = r"\A([A-Za-z0-9][A-Za-z0-9_.-]*\.safetensors|adapter_config\.json)\Z"
FileName = Annotated[str, msgspec.Meta(pattern=_FILE, max_length=100)]

Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]

CHECKSUM_BYTES = 32
MAX_LANES = 16  # of one child
NO_DATA = memoryview(b"")
LaneKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # of AES-256
Checksum = Annotated[bytes, msgspec.Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]

# Runs of neighbouring chunks: file, first chunk, number of chunks.
Runs: TypeAlias = tuple[tuple[Index, Index, Positive], ...]


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a version, e.g. `FileEntry("model-00001.safetensors", 2147483648, "9f2c...")`."""

    name: FileName
    size: Positive  # bytes
    digest: Digest  # `digests.digest_of` the checksums of its chunks
    width: Literal[2, 4] = 4  # bytes of an element, for deltas


class Manifest(msgspec.Struct, frozen=True):
    """Contents of a version; also `manifest.json` in its folder.

    E.g. `Manifest(7, "ab12...", 4194304, (FileEntry("model-00001.safetensors", 8500000, "9f2c..."),))`, whose
    file has 3 chunks. The publisher chooses the chunk size, so every node cuts a version in the same way.
    """

    version: Version
    digest: str  # `digests.version_digest` of the files
    chunk_bytes: ChunkBytes
    files: Annotated[tuple[FileEntry, ...], msgspec.Meta(min_length=1)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files)

    def has_layout_of(self, base: "Manifest") -> bool:
        """True if chunks can be deltas against `base`: both have equal file names, file sizes and chunk sizes."""
        layout, other = ([(entry.name, entry.size) for entry in m.files] for m in (self, base))
        return layout == other and self.chunk_bytes == base.chunk_bytes

    def num_chunks(self, file: int) -> int:
        """Number of chunks in one file; the last chunk may be shorter."""
        return -(-self.files[file].size // self.chunk_bytes)


class Upward(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of the records that a child node or a subscriber sends to the node above it."""


class Downward(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of the records that a node sends to the child nodes and subscribers below it."""


class Attach(Upward, frozen=True):
    """A child node asks its parent to announce versions above `newest`, the highest it knows (-1: none)."""

    newest: Annotated[int, msgspec.Meta(ge=-1)]


class Want(Upward, frozen=True):
    """A child needs this version even if newer ones exist; the parent keeps it until the child's `Done`."""

    version: Version
    arriving: bool = False  # the child already downloads it and needs no announcement


class Fetch(Upward, frozen=True, kw_only=True):
    """A child asks for chunks [first_chunk, first_chunk + credits); the parent sends each once it has it."""

    version: Version
    file: Index  # place in `Manifest.files`
    first_chunk: Index
    credits: Positive
    base: Version | None = None  # a version that the child has: the parent may send deltas against it


class AskHeld(Upward, frozen=True):
    """A node that is no child asks which chunks of a version it may request here; answered by `Held` or `Lost`."""

    version: Version
    digest: Digest


class Done(Upward, frozen=True):
    """A child has the version, or no longer needs it; the parent need not keep it for this child."""

    version: Version


class OpenLanes(Upward, frozen=True):
    """A child asks for so many lanes, see `relay/lanes.py`; the parent ends those it had and sends `Lanes`."""

    count: Positive


class Subscribe(Upward, frozen=True):
    """A subscriber asks for a `Newest` at each complete version."""


class Pull(Upward, frozen=True, kw_only=True):
    """A subscriber asks for a version (None: the newest); the node keeps it until the next pull."""

    id: int  # ascending within a session
    session: int  # a random number that each start of a subscriber draws
    name: Name
    version: Version | None = None
    base: Annotated[int, msgspec.Meta(ge=-1)] = -1  # the engine serves this version: change files will do


class Release(Upward, frozen=True):
    """A subscriber no longer needs the version that the pull with this id gave it."""

    id: int
    session: int
    name: Name


class Announce(Downward, frozen=True):
    """The parent offers a version; perhaps not all of its chunks have arrived there yet."""

    manifest: Manifest
    base: Version | None = None  # the parent has deltas against this version


class Chunk(Downward, frozen=True, kw_only=True):
    """A chunk of a file. The publisher computes `checksum`, and every node forwards the checksum unchanged."""

    version: Version
    file: Index
    index: Index
    checksum: Checksum  # BLAKE3 of the chunk in full, also where `data` is a delta
    base: Version | None = None  # `data` is a delta against this version; None: it is the chunk in full
    proof: Checksum | None = None  # of a delta: `digests.delta_proof`
    # [Manifest.chunk_bytes], shorter for a file's last chunk or a delta. Travels as a frame of its own.
    data: memoryview = NO_DATA


class Ticket(msgspec.Struct, frozen=True):
    """Admits one lane of one child. Fresh random bytes, which travel on the control connection only."""

    id: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    hello_key: LaneKey  # from child to parent
    chunk_key: LaneKey  # from parent to child

    def __repr__(self) -> str:
        return "Ticket(...)"  # logs must not hold keys


class Lanes(Downward, frozen=True, kw_only=True):
    """Answer to `OpenLanes`: the child may connect to this port of the parent's host, once with each ticket."""

    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    sealed: bool  # chunks are encrypted; else only the hello is proven
    tickets: Annotated[tuple[Ticket, ...], msgspec.Meta(min_length=1, max_length=MAX_LANES)]


class Held(Downward, frozen=True):
    """Answer to `AskHeld`: chunks that the sender may request here; none while this node has more urgent work."""

    version: Version
    runs: Runs


class Lost(Downward, frozen=True):
    """Neither this node nor any node above it has the wanted version."""

    version: Version


class Failed(Downward, frozen=True):
    """The node cannot hold the version, e.g. where shared memory is full; a child then tries its next parent."""

    version: Version
    reason: str


class Newest(Downward, frozen=True):
    """The newest version that is complete at this node, or whose changes are."""

    version: Version


class Granted(Downward, frozen=True, kw_only=True):
    """Answer to the `Pull` with this id: a verified version's folder on this host, or the changes up to it.

    E.g. `Granted(id=3, version=7, path="/dev/shm/run/node-0/v7", digest="ab12...")`.
    """

    id: int
    version: Version
    path: str
    digest: str
    changes: tuple[str, ...] = ()  # files to apply in turn to `Pull.base`; then the folder may not exist yet


class Refused(Downward, frozen=True):
    """Refusal of the `Pull` with this id: no node has the version if `lost`, else this node cannot hold it."""

    id: int
    lost: bool
    reason: str


ToParent: TypeAlias = Attach | Want | Fetch | AskHeld | Done | OpenLanes | Subscribe | Pull | Release
ToChild: TypeAlias = Announce | Chunk | Lanes | Held | Lost | Failed | Newest | Granted | Refused


class VersionComplete(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Event: a node holds a verified version. Seconds count from the start of its download; 0 at the root."""

    node: str
    version: int
    digest: str
    num_bytes: int
    base: int | None  # the version that its deltas were against; None where all chunks came in full
    wire_bytes: int  # bytes of the chunks that the node received, as deltas or in full
    first_byte_s: float
    elapsed_s: float
    parent: str = ""  # endpoint of the parent when the version was complete; empty at the root
    other_bytes: int = 0  # of `wire_bytes`, from other nodes than the parent


class VersionPulled(msgspec.Struct, frozen=True, tag=True):
    """Event: a subscriber got a version from the node of its host, `waited_s` after it asked."""

    node: str
    subscriber: str
    version: int
    waited_s: float


class VersionFailed(msgspec.Struct, frozen=True, tag=True):
    """Event: a node gave up a version; `reason` names the setting to change, if one helps."""

    node: str
    version: int
    reason: str


class ParentLost(msgspec.Struct, frozen=True, tag=True):
    """Event: a node left the parent at endpoint `old` and connects to `new` (the same if it has no other)."""

    node: str
    old: str
    new: str


RelayEvent: TypeAlias = VersionComplete | VersionPulled | VersionFailed | ParentLost


class RelayKeys(msgspec.Struct, frozen=True):
    """The keypair that all parties of one run share, e.g. `generate_keys()`; each holder may connect."""

    public: str  # 40 characters, Z85
    secret: str  # 40 characters, Z85

    def __repr__(self) -> str:
        return f"RelayKeys(public={self.public!r}, secret=...)"  # logs must not hold the secret
