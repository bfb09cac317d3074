"""A weight source over local folders; the test publishes by hand."""

import asyncio

from laminar_py.records.weights import PulledVersion, VersionLostError


class Folders:
    """Version N is in folder N modulo their number; of all versions the newest `keep` stay, and none in `lost`."""

    def __init__(self, folders, *, keep=None):
        self.folders = folders
        self.newest = 0
        self.lost = set()
        self.changes = {}  # (base, version) -> files
        self.pulls = []  # (version, base)
        self._keep = keep
        self._changed = asyncio.Condition()

    async def publish(self, version):
        async with self._changed:
            self.newest = version
            self._changed.notify_all()

    async def wait_newer(self, version):
        async with self._changed:
            await self._changed.wait_for(lambda: self.newest > version)
            return self.newest

    async def pull(self, version=None, *, base=-1):
        version = self.newest if version is None else version
        if version in self.lost or (self._keep is not None and version <= self.newest - self._keep):
            raise VersionLostError(f"version {version}")
        self.pulls.append((version, base))
        folder, files = self.folders[version % len(self.folders)], self.changes.get((base, version), ())
        return PulledVersion(version, str(folder), f"digest{version}", tuple(map(str, files)))
