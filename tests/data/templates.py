"""Chat templates of the kinds that models come with, and a model folder whose tokenizer has one."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers

from laminar_py.config.data import ChatConfig
from laminar_py.data.chat import PromptEncoder
from laminar_py.data.tokenizer import load_tokenizer

WORDS = "<|im_start|> <|im_end|> <|start_header_id|> <|end_header_id|> <|eot_id|> [INST] [/INST] <start_of_turn>"
SPECIAL = ["<pad>", "<s>", "</s>", *WORDS.split(), "<end_of_turn>", "<think>", "</think>"]
EOS = SPECIAL.index("</s>")


@dataclass(frozen=True)
class Template:
    """A template, messages that it takes, and the token that ends a turn of the assistant."""

    text: str
    end: str
    arguments: dict[str, object] = field(default_factory=dict)
    system: bool = True  # has a role for one


TEMPLATES = {
    "chatml": Template(
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "headers": Template(
        "{{ bos_token }}{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
        "{{ message['content'] | trim }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>"
        "assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>",
    ),
    "instructions": Template(
        "{{ bos_token }}{% if messages[0].role == 'system' %}{% set system = messages[0].content + '\n\n' %}"
        "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
        "{% for turn in turns %}{% if (turn.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if turn.role == 'user' %}[INST] "
        "{% if loop.first %}{{ system }}{% endif %}{{ turn.content }} [/INST]{% else %} {{ turn.content }}"
        "{{ eos_token }}{% endif %}{% endfor %}",
        "</s>",
    ),
    "turns": Template(
        "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}<start_of_turn>"
        "{{ 'model' if message.role == 'assistant' else message.role }}\n{{ message.content | trim }}"
        "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<end_of_turn>",
        system=False,
    ),
    "thinking": Template(
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'assistant' and '</think>' in message.content %}\n"
        "        {%- set said = message.content.split('</think>')[-1].lstrip('\\n') %}\n    {%- else %}\n"
        "        {%- set said = message.content %}\n    {%- endif %}\n"
        "    {{- '<|im_start|>' + message.role + '\\n' + said + '<|im_end|>\\n' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|im_start|>assistant\\n' }}\n"
        "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
        "        {{- '<think>\\n\\n</think>\\n\\n' }}\n    {%- endif %}\n{%- endif %}",
        "<|im_end|>",
        arguments={"enable_thinking": False},
    ),
}
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
TOOLS = (
    "{% for m in messages %}{{ m.role }} {{ m.name }}: {% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}\n{% endfor %}"
)
USED = [
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "4"},
]
CONVERSATIONS = [
    [("user", "2+2=")],
    [("system", "Answer in one word."), ("user", "  Wie heißt «π» auf Deutsch?\n\n")],
    [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "日本 <|im_end|> </s> [INST] <s>")],
]


def conversations(template: Template) -> list[list[dict[str, str]]]:
    """Messages that a template takes; what they say may look like its own tokens."""
    turns = [[{"role": role, "content": content} for role, content in one] for one in CONVERSATIONS]
    return [one for one in turns if template.system or one[0]["role"] != "system"]


def byte_level_backend(*, space: bool = False) -> tokenizers.Tokenizer:
    """A byte for each token, without merges."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id for id, token in enumerate([*SPECIAL, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=space)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


def sentencepiece_backend(scheme: str) -> tokenizers.Tokenizer:
    """Characters and bytes of SentencePiece, a space merged with each letter behind it.

    A text gets a space in front: by a normaliser (`prepend`), also behind special tokens, or by Metaspace.
    """
    letters = [chr(code) for code in range(33, 127)]
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, *(f"▁{one}" for one in letters)]
    vocabulary = {token: id for id, token in enumerate(dict.fromkeys(words))}
    merges = [("▁", one) for one in letters]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges, byte_fallback=True))
    if scheme == "prepend":
        steps = [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
        backend.normalizer = tokenizers.normalizers.Sequence(steps)
    else:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    ends = [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    backend.decoder = tokenizers.decoders.Sequence([*ends, tokenizers.decoders.Strip(" ", 1, 0)])
    return backend


BACKENDS = {
    "byte-level": byte_level_backend,
    "byte-level space": lambda: byte_level_backend(space=True),
    "prepend": lambda: sentencepiece_backend("prepend"),
    "first": lambda: sentencepiece_backend("first"),
    "always": lambda: sentencepiece_backend("always"),
}


def make_tokenizer_folder(folder: Path, template: str | None, kind: str = "byte-level") -> Path:
    """Files of a tokenizer that puts `<s>` before a text, with a template."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = BACKENDS[kind]()
    backend.add_special_tokens(SPECIAL)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", SPECIAL.index("<s>"))]
    )
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "clean_up_tokenization_spaces": False,
    }
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if not (folder / "config.json").is_file():
        (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return folder


def make_chat_encoder(
    folder: Path, template: str | None, kind: str = "byte-level", **settings: object
) -> PromptEncoder:
    """Encoder for a model with that template."""
    make_tokenizer_folder(folder, template, kind)
    return PromptEncoder(load_tokenizer(folder), folder, ChatConfig.model_validate_json(json.dumps(settings)))
