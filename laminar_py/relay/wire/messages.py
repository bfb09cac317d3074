"""Wire records of the relay tree, the manifest of a version, and the reports a node makes. No behaviour.

Every party speaks to one node above it and listens to those below. A record is one MessagePack frame with a `type`
field, which any MessagePack reader can open; the bytes of a chunk are a second frame, so that nobody copies them.

A node and its parent:
    attached:   Attach(newest)          -> Announce(newer)           at every connect, and now and then, so that
                                                                     nothing that was lost on the way stays so
    fetching:   Announce(v), Fetch(v)*  -> Chunk* | Lost(v)          Fetch grants credits; the parent sends chunks
                                                                     as it gets them itself (cut-through), as
                                                                     deltas to a base that the child says it has
    complete:   Done(v)                                              verified here, or not needed here any more
    overtaken:  Announce(v') with v' > v                             v is abandoned, unless somebody wants it, v'
                                                                     builds on it, or v itself overtook another
    wanting:    Want(v)                 -> Announce(v) | Lost(v)     a pull of an older version, asked on upwards
    holding:    Want(v, arriving)       -> Lost(v) if it is not here v is on its way, and may not be abandoned
    failed:     Failed(v)                                            the parent cannot have v: try the next parent
A subscriber and its node:
    subscribed: Subscribe               -> Newest*                   now and whenever a version is complete
    pulling:    Pull(id)                -> Granted(id) | Refused(id)
    done:       Release                                              what it pulled last need not be held
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

Version = Annotated[int, msgspec.Meta(ge=0)]
Index = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
MIN_CHUNK_BYTES = 4096  # a node keeps a byte of state per chunk
ChunkBytes = Annotated[int, msgspec.Meta(ge=MIN_CHUNK_BYTES)]
# Names become file names, so nothing that could leave the folder is one.
Name = Annotated[str, msgspec.Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_.-]*\Z", max_length=100)]
_FILE = r"\A([A-Za-z0-9][A-Za-z0-9_.-]*\.safetensors|adapter_config\.json)\Z"  # never a name of the store's own
FileName = Annotated[str, msgspec.Meta(pattern=_FILE, max_length=100)]

Digest = Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{64}\Z")]

CHECKSUM_BYTES = 32
NOTHING = memoryview(b"")
Checksum = Annotated[bytes, msgspec.Meta(min_length=CHECKSUM_BYTES, max_length=CHECKSUM_BYTES)]


class FileEntry(msgspec.Struct, frozen=True):
    """A file of a version, e.g. `FileEntry("model-00001.safetensors", 2147483648, "9f2c...")`."""

    name: FileName
    size: Positive  # bytes
    digest: Digest  # `digests.digest_of` the checksums of its chunks
    width: Literal[2, 4] = 4  # bytes of an element, for deltas


class Manifest(msgspec.Struct, frozen=True):
    """Contents of a version; also `manifest.json` in its folder.

    E.g. `Manifest(7, "ab12...", 4194304, (FileEntry("model-00001.safetensors", 8500000, "9f2c..."),))`, whose
    file has 3 chunks. Chunk sizes are the publisher's, so every node cuts a version in the same way.
    """

    version: Version
    digest: str  # `digests.version_digest` of the files
    chunk_bytes: ChunkBytes
    files: Annotated[tuple[FileEntry, ...], msgspec.Meta(min_length=1)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the files together."""
        return sum(entry.size for entry in self.files)

    def fits(self, base: "Manifest") -> bool:
        """True if its chunks can be deltas against those of `base`: the same files of the same sizes."""
        layout, other = ([(entry.name, entry.size) for entry in m.files] for m in (self, base))
        return layout == other and self.chunk_bytes == base.chunk_bytes

    def num_chunks(self, file: int) -> int:
        """Chunks of one file; the last may be shorter."""
        return -(-self.files[file].size // self.chunk_bytes)


class Upward(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of what goes to the node above."""


class Downward(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of what goes to nodes and subscribers below."""


class Attach(Upward, frozen=True):
    """A node is here and takes this one for its parent; it has heard of versions up to `newest`, -1 for none."""

    newest: Annotated[int, msgspec.Meta(ge=-1)]


class Want(Upward, frozen=True):
    """The node below needs this version even if newer ones exist. Kept for it until its `Done`."""

    version: Version
    arriving: bool = False  # it is on its way there: no announcement is needed


class Fetch(Upward, frozen=True, kw_only=True):
    """Send chunks [first_chunk, first_chunk + credits) of a file, each as soon as it is there."""

    version: Version
    file: Index  # place in `Manifest.files`
    first_chunk: Index
    credits: Positive
    base: Version | None = None  # which the node below has: deltas against it will do


class Done(Upward, frozen=True):
    """The node below has the version, or needs it no longer: it need not be kept for that node's sake."""

    version: Version


class Subscribe(Upward, frozen=True):
    """A subscriber wants to hear of complete versions."""


class Pull(Upward, frozen=True):
    """A subscriber asks for a version (None: the newest complete one) and to have it held until its next pull."""

    id: int  # of one session, ascending
    session: int  # another one for each life of a subscriber of that name
    name: Name
    version: Version | None


class Release(Upward, frozen=True):
    """A subscriber needs no longer what it was given by its pull of that id."""

    id: int
    session: int
    name: Name


class Announce(Downward, frozen=True):
    """A version that may be fetched from here, though perhaps not all of it is here yet."""

    manifest: Manifest
    base: Version | None = None  # there are deltas against this version


class Chunk(Downward, frozen=True, kw_only=True):
    """Piece of a file. `checksum` is made where the version entered the tree and travels unchanged."""

    version: Version
    file: Index
    index: Index
    checksum: Checksum  # BLAKE3 of the piece itself, also where `data` is a delta
    base: Version | None = None  # that `data` is a delta against
    # [Manifest.chunk_bytes], the last of a file may be shorter; or a delta. Travels as a frame of its own.
    data: memoryview = NOTHING


class Lost(Downward, frozen=True):
    """Neither this node nor any above it has the wanted version."""

    version: Version


class Failed(Downward, frozen=True):
    """Refusal: the node cannot hold the version, e.g. for want of shared memory; children try the next parent."""

    version: Version
    reason: str


class Newest(Downward, frozen=True):
    """The newest version that is complete here."""

    version: Version


class Granted(Downward, frozen=True):
    """Answer to the `Pull` of that id: a verified folder on this host."""

    id: int
    version: Version
    path: str
    digest: str


class Refused(Downward, frozen=True):
    """Answer to the `Pull` of that id: `lost` if no relay has the version, else why this node cannot hold it."""

    id: int
    lost: bool
    reason: str


ToParent: TypeAlias = Attach | Want | Fetch | Done | Subscribe | Pull | Release
ToChild: TypeAlias = Announce | Chunk | Lost | Failed | Newest | Granted | Refused


class VersionComplete(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Report: a node holds a verified version. Seconds count from its first request for it; all 0 at the root."""

    node: str
    version: int
    digest: str
    num_bytes: int
    base: int | None  # version that it came as a delta against; None where it came in full
    wire_bytes: int  # that came for it
    first_byte_s: float
    elapsed_s: float
    parent: str = ""  # endpoint of the node that the last of it came from; none at the root


class VersionPulled(msgspec.Struct, frozen=True, tag=True):
    """Report: a subscriber has got a version from the node of its host, `waited_s` after it asked."""

    node: str
    subscriber: str
    version: int
    waited_s: float


class VersionFailed(msgspec.Struct, frozen=True, tag=True):
    """Report: a node gave a version up; the reason names the setting to change where there is one."""

    node: str
    version: int
    reason: str


class ParentLost(msgspec.Struct, frozen=True, tag=True):
    """Report: a node left the parent at endpoint `old` and turns to `new` (the same if it has no other)."""

    node: str
    old: str
    new: str


RelayEvent: TypeAlias = VersionComplete | VersionPulled | VersionFailed | ParentLost
