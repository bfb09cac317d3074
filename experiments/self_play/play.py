"""Games of two models against each other, each move sampled."""

from collections.abc import Sequence
from pathlib import Path

import torch
from game import left, question
from transformers import AutoModelForCausalLM, AutoTokenizer

MOST_TOKENS = 4  # of a move


class Player:
    """A model of a folder, e.g. `Player(Path("out/trained"))`."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    def moves(self, piles: Sequence[int]) -> list[str]:
        """Sample the move for each pile."""
        messages = [[{"role": "user", "content": question(pile)}] for pile in piles]
        asked = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        with torch.inference_mode():
            whole = self._model.generate(**asked, do_sample=True, top_k=0, top_p=1.0, max_new_tokens=MOST_TOKENS)
        said = whole[:, asked["input_ids"].shape[1] :]
        return self._tokenizer.batch_decode(said, skip_special_tokens=True)


def wins(first: Player, second: Player, piles: Sequence[int]) -> list[bool]:
    """Play a game for each pile; return whether the first player won."""
    at = list(piles)
    won: list[bool | None] = [None] * len(at)
    mover, other = first, second
    while going := [game for game, winner in enumerate(won) if winner is None]:
        for game, said in zip(going, mover.moves([at[game] for game in going]), strict=True):
            rest = left(at[game], said)
            if not rest:  # no move loses, the last one wins
                won[game] = (rest == 0) == (mover is first)
            at[game] = rest or 0
        mover, other = other, mover
    return [bool(winner) for winner in won]
