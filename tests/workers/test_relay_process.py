"""The process of a relay that comes back, whose port another process holds."""

import socket

import pytest

from laminar_py.config.loading import load_config
from laminar_py.ledger.run_folder import run_of
from laminar_py.relay.wire.transport import PortInUseError, RelayKeys
from laminar_py.runtime.workers.processes import base
from laminar_py.runtime.workers.processes.relay import RelayActor
from laminar_py.runtime.workers.specs import RelaySpec
from tests.runs.runs import REPO


@pytest.mark.parametrize("or_any_port", [True, False])
async def test_a_port_that_stays_taken_is_given_up_for_another_unless_the_user_chose_it(
    tmp_path, monkeypatch, or_any_port
):
    monkeypatch.setattr(base, "log_to", lambda run_dir, part: None)
    keys, actor = RelayKeys.generate(), RelayActor()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        spec = RelaySpec(
            config=load_config(REPO / "configs/quickstart.yaml", []).model_dump_json(),
            run_dir=str(tmp_path),
            node=1,
            store=str(tmp_path / "node-1"),
            port=port,
            patience_s=0.2,
            or_any_port=or_any_port,
            parents=(),
            chunk_bytes=4096,
            public_key=keys.public,
            secret_key=keys.secret,
        )
        if not or_any_port:
            with pytest.raises(PortInUseError, match=f"relay.base_port={port}: in use"):
                await actor.start(spec)
        else:
            endpoint = await actor.start(spec)
            assert not endpoint.endswith(f":{port}")
            assert await actor.ping(()) == []
            assert run_of(tmp_path).path == tmp_path, "its folder in shared memory names the run"
        await actor._node.close()
