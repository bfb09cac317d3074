"""Ids of chat templates: ours are those of a real SGLang server's chat endpoint. A start takes 20 s."""

import json
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from laminar_py.data.chat import read_turns
from laminar_py.engines.sglang.http import headers
from laminar_py.engines.sglang.server import SGLangServer
from tests.data.templates import TEMPLATES, TOOLS, USED, conversations, make_chat_encoder, make_tokenizer_folder
from tests.engines.sglang.rig import make_model, running_server

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

FLAGS = {"skip-tokenizer-init": False, "trust-request-chat-template": True}  # so that one server serves them all


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    model = make_model(folder / "model", seed=0)
    make_tokenizer_folder(model, TEMPLATES["chatml"].text)
    async with running_server(model, folder, flags=FLAGS) as running:
        yield running


async def their_ids(server: SGLangServer, messages: list[dict[str, str]], **arguments: object) -> list[int]:
    """Ids that the chat endpoint makes of messages."""
    wanted = {"max_tokens": 1, "return_prompt_token_ids": True}
    body = {"messages": messages, "chat_template_kwargs": arguments, **wanted}
    async with (
        aiohttp.ClientSession(headers=headers(server.api_key)) as session,
        session.post(f"{server.url}/v1/chat/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        (choice,) = (await response.json())["choices"]
    return choice["prompt_token_ids"]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_messages_have_the_ids_of_sglangs_chat_endpoint(server, tmp_path: Path, name: str) -> None:
    template = TEMPLATES[name]
    encoder = make_chat_encoder(tmp_path, template.text, arguments=template.arguments)
    for conversation in conversations(template):
        _, ids = encoder.encode(conversation)
        theirs = await their_ids(server, conversation, chat_template=template.text, **template.arguments)
        assert theirs == ids.tolist()


async def test_calls_of_tools_and_parts_of_text_have_the_ids_of_the_endpoint(server, tmp_path: Path) -> None:
    encoder = make_chat_encoder(tmp_path, TOOLS)
    parts = [{"type": "text", "text": "2+2"}, {"type": "text", "text": "="}]
    messages = [{"role": "user", "content": parts}, *USED[1:]]
    _, ids = encoder.encode(read_turns(json.dumps(messages)))
    assert ids.tolist() == await their_ids(server, messages, chat_template=TOOLS)


async def test_a_template_in_the_models_folder_is_the_one_that_the_endpoint_uses(server, tmp_path: Path) -> None:
    encoder = make_chat_encoder(tmp_path, TEMPLATES["chatml"].text)
    for conversation in conversations(TEMPLATES["chatml"]):
        _, ids = encoder.encode(conversation)
        assert await their_ids(server, conversation) == ids.tolist()
