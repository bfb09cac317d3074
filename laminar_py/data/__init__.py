"""Problems, prompts and tokenizers."""

from typing import TYPE_CHECKING

from laminar_py._lazy import public_names

if TYPE_CHECKING:
    from laminar_py.data.chat import REMEDY as REMEDY
    from laminar_py.data.chat import Message as Message
    from laminar_py.data.chat import PromptEncoder as PromptEncoder
    from laminar_py.data.chat import TemplateError as TemplateError
    from laminar_py.data.chat import Turn as Turn
    from laminar_py.data.chat import parts_of as parts_of
    from laminar_py.data.chat import read_turns as read_turns
    from laminar_py.data.demonstrations import Demonstration as Demonstration
    from laminar_py.data.demonstrations import Demonstrations as Demonstrations
    from laminar_py.data.problems import ProblemSet as ProblemSet
    from laminar_py.data.problems import find_leaks as find_leaks
    from laminar_py.data.problems import read_prompts as read_prompts
    from laminar_py.data.problems import text_of as text_of
    from laminar_py.data.sources import DataSource as DataSource
    from laminar_py.data.sources import other_fields as other_fields
    from laminar_py.data.sources import read_records as read_records
    from laminar_py.data.sources import source_at as source_at
    from laminar_py.data.sources import written_field as written_field
    from laminar_py.data.stream import read_levels as read_levels
    from laminar_py.data.stream import sort_levels as sort_levels
    from laminar_py.data.tokenizer import Tokenizer as Tokenizer
    from laminar_py.data.tokenizer import load_tokenizer as load_tokenizer
else:
    __getattr__ = public_names(__name__)
