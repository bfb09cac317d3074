"""Problems, prompts and tokenizers."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.data.tiny_models import EOS as EOS
    from laminar_py.data.tiny_models import PAD as PAD
    from laminar_py.data.tiny_models import SPECIAL as SPECIAL
    from laminar_py.data.tiny_models import jsonl as jsonl
    from laminar_py.data.tiny_models import make_data as make_data
    from laminar_py.data.tiny_models import tiny_model as tiny_model
    from laminar_py.data.tokenizer import Tokenizer as Tokenizer
    from laminar_py.data.tokenizer import load_tokenizer as load_tokenizer
else:
    __getattr__ = public_names(__name__)
