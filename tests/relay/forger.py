"""Frames that no honest party sends, from a seeded generator: nonsense, wild values, damaged replays."""

import random
from collections.abc import Callable, Iterable, Iterator

import msgpack
import msgspec

from laminar_py.records import codec
from laminar_py.relay import messages as m
from laminar_py.relay.delta import encode
from laminar_py.relay.digests import version_digest
from laminar_py.relay.sockets import to_frames
from laminar_py.relay.stored_version import StoredVersion
from tests.relay.delta_builders import Forgery, weights
from tests.relay.tree import CHUNK

MAX_VERSION = 1_000_000  # of most forged ones
WILD_INTS = (-(2**63), -1, 0, 1, 2, 3, 255, 2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
WILD_NAMES = (
    *("", ".", "..", "../up", "a/b", "/etc/passwd", "a\0b", "a\n", ".hidden", "-rf", "x" * 100, "x" * 101),
    *("manifest.json", "model.safetensors", "../model.safetensors", "a\0.safetensors", "\u0435", "v1", "pin-a~"),
)
MARK, NO_TEXT = "not utf-8", b"no \xff\xfe utf"  # the one is replaced by the other, as long, in packed frames


class Forger:
    """Frames from a seeded generator. `real` are frames that were once right."""

    def __init__(self, rng: random.Random, kinds: Iterable[type], version: StoredVersion) -> None:
        self._rng = rng
        self._kinds = tuple(kinds)
        self._version = version
        self._real = [_frames(record) for record in _real(version, self._kinds)]
        self._deltas = _deltas(version)

    def frames(self, count: int) -> Iterator[list[bytes]]:
        """Messages, nearly all of as many frames as there should be; none if there are no kinds."""
        if not self._kinds:
            return
        ways: list[tuple[int, Callable[[], list[bytes]]]] = [
            (10, lambda: [self._rng.randbytes(self._rng.randrange(200))]),
            (10, lambda: [packed(self._value(depth=3))]),
            (50, self._record),
        ]
        if self._real:
            ways += [(20, self._damaged), (10, lambda: self._rng.choice(self._real))]
        for make in self._rng.choices([make for _, make in ways], [weight for weight, _ in ways], k=count):
            frames = make()
            yield frames if self._rng.random() < 0.995 else [frames[0]] * self._rng.choice([1, 2, 3, 10])

    def _record(self) -> list[bytes]:
        """Of a kind that exists, some fields wild."""
        kind = self._rng.choice(self._kinds)
        fields = {field: self._field(field) for field in kind.__struct_fields__}
        for field in list(fields):
            chance = self._rng.random()
            if chance < 0.05:
                fields[field] = self._value(depth=2)
            elif chance < 0.06:
                del fields[field]
        if self._rng.random() < 0.02:
            fields["beyond"] = self._value(depth=3)
        data = fields.get("data")
        if isinstance(data, bytes) and self._rng.random() < 0.98:
            return [packed({"type": kind.__struct_config__.tag, **fields, "data": b""}), data]
        return [packed({"type": kind.__struct_config__.tag, **fields})]

    def _field(self, field: str) -> object:
        match field:
            case "manifest":
                return self._manifest()
            case "node" | "name":
                return self._rng.choice(("replica", "relay-9", *WILD_NAMES))
            case "path" | "reason" | "digest":
                return self._rng.choice((*WILD_NAMES, MARK, "00" * 32, "y" * 2000))
            case "tickets":
                return [self._ticket() for _ in range(self._rng.choice((0, 1, 1, 2, 17)))]
            case "port":
                return self._rng.choice((1, 9, 65535, 65536, 0))
            case "sealed":
                return self._rng.choice((True, False, 1))
            case "checksum":
                return self._rng.choice((b"", bytes(32), bytes(33)))
            case "data":
                return self._rng.choice((b"", bytes(CHUNK), self._rng.randbytes(100), *self._deltas))
            case "lost" | "arriving":
                return self._rng.choice((True, False, 1))
            case "base" | "version" if self._rng.random() < 0.2:
                return None
            case "first_chunk" | "index" | "file" | "id" | "session" | "version" | "base" if (
                self._rng.random() < 0.7
            ):
                return self._rng.randrange(5)
            case "credits" if self._rng.random() < 0.9:
                return self._rng.randrange(1, 9)
        return self._rng.choice(WILD_INTS)

    def _ticket(self) -> dict[str, object]:
        sizes = (16, 32, 32) if self._rng.random() < 0.9 else (15, 33, 0)
        return dict(zip(("id", "hello_key", "chunk_key"), map(self._rng.randbytes, sizes), strict=True))

    def _manifest(self) -> dict[str, object]:
        """Often one that is in order, but for digests that nothing has."""
        rng, right = self._rng, self._version.manifest.files[0]
        files = [
            {
                "name": rng.choice((right.name, right.name, f"b{number}.safetensors", *WILD_NAMES)),
                "size": rng.choice((right.size, right.size, CHUNK, 1, *WILD_INTS)),
                "digest": rng.choice(
                    (rng.randbytes(32).hex(), rng.randbytes(32).hex(), "", "zz", MARK, right.digest)
                ),
                "width": rng.choice((2, 4, 4, 4, 3)),
            }
            for number in range(rng.choice((0, 1, 1, 1, 2)))
        ]
        if files:
            files[0]["digest"] = rng.choice((rng.randbytes(32).hex(), "zz" * 32))
        return {
            "version": rng.choice((rng.randrange(2, MAX_VERSION), *WILD_INTS)),
            "digest": _digest_of(files),
            "chunk_bytes": rng.choice((CHUNK, CHUNK, CHUNK, 1, *WILD_INTS)),
            "files": files,
        }

    def _damaged(self) -> list[bytes]:
        """A real message with one frame damaged."""
        frames = list(self._rng.choice(self._real))
        place = self._rng.randrange(len(frames))
        frames[place] = self._damage(frames[place] or b"\0")
        return frames

    def _damage(self, right: bytes) -> bytes:
        """A frame cut short, prolonged, joined with another, or with bits that flipped."""
        frame = bytearray(right)
        place = self._rng.randrange(len(frame))
        match self._rng.randrange(4):
            case 0:
                return bytes(frame[:place])
            case 1:
                return bytes(frame) + self._rng.randbytes(self._rng.randrange(1, 50))
            case 2:
                return bytes(frame[:place]) + self._rng.choice(self._real)[0][place:]
        for _ in range(self._rng.randrange(1, 9)):
            frame[self._rng.randrange(min(len(frame), 300))] ^= 1 << self._rng.randrange(8)
        return bytes(frame)

    def _value(self, depth: int) -> object:
        rng = self._rng
        leaves = (None, True, 0.5, float("nan"), b"\0", MARK, rng.choice(WILD_INTS), rng.choice(WILD_NAMES))
        match rng.randrange(12) if depth else 0:
            case 1 | 2:
                return [self._value(depth - 1) for _ in range(rng.randrange(4))]
            case 3 | 4:
                return {str(self._value(0)): self._value(depth - 1) for _ in range(rng.randrange(4))}
            case 5 if depth > 2 and rng.random() < 0.1:
                return _Packed(b"\x91" * rng.choice((100, 2000, 100_000)) + b"\xc0")
        return rng.choice(leaves)


class _Packed(msgspec.Struct):
    """What is MessagePack already; travels through the packer under a mark."""

    frame: bytes


def packed(value: object) -> bytes:
    deep: list[bytes] = []

    def stand_in(other: object) -> object:
        assert isinstance(other, _Packed), other
        deep.append(other.frame)
        return f"<{len(deep)}>"

    frame: bytes = msgpack.packb(value, default=stand_in)
    for number, content in enumerate(deep, 1):
        frame = frame.replace(msgpack.packb(f"<{number}>"), content)
    return frame.replace(MARK.encode(), NO_TEXT)


def _digest_of(files: list[dict[str, object]]) -> str:
    try:
        return version_digest([m.FileEntry(str(f["name"]), 1, str(f["digest"])) for f in files])
    except ValueError:
        return "00" * 32


def _real(version: StoredVersion, kinds: tuple[type, ...]) -> list[m.Upward | m.Downward]:
    """Records of these kinds as they travel when all is well."""
    number = version.manifest.version
    upward: list[m.Upward | m.Downward] = [
        m.Attach(number),
        m.Want(number),
        m.Want(number, arriving=True),
        m.Fetch(version=number, file=0, first_chunk=0, credits=2),
        m.Fetch(version=number, file=0, first_chunk=1, credits=2, base=number),
        m.AskHeld(number, version.manifest.digest),
        m.Done(number),
        m.OpenLanes(1),
        m.Subscribe(),
        m.Pull(id=1, session=5, name="replica", version=None),
        m.Pull(id=2, session=5, name="replica", version=number),
    ]
    downward = [m.Announce(version.manifest), m.Lost(number), m.Failed(number, "full"), m.Newest(number)]
    downward.append(m.Held(number, version.whole_runs()))
    downward += [version.read_chunk(0, index) for index in range(version.manifest.num_chunks(0))]
    return [record for record in (*upward, *downward) if isinstance(record, kinds)]


def _frames(record: m.Upward | m.Downward) -> list[bytes]:
    """As it travels."""
    if isinstance(record, m.Downward):
        return [bytes(frame) for frame in to_frames(record)]
    return [codec.encode(record)]


def _deltas(version: StoredVersion) -> list[bytes]:
    """Payloads that decode to something else, or promise little and are much."""
    new, old = weights(CHUNK, width=4, density=0.05, seed=1)
    payload = encode(new, old, width=4)
    assert payload is not None
    forged, bomb = Forgery.of(payload), bytes(2**26)
    return [payload, *(forged.with_plane(place, bomb).bytes() for place in (0, 1, 2, 3)), payload[:-1]]
