"""The game: two players take 1 to 3 from a pile in turn, and the player who takes the last has won."""

STARTS = range(1, 13)  # piles of training
PILES = range(5, 13)  # of the games that count: in smaller ones the first move wins at once, or loses
MOST = 3
PLAYERS = ("first", "second")


def question(pile: int) -> str:
    """Make the message to a player."""
    return f"{pile} left"


def left(pile: int, said: str) -> int | None:
    """What is left after a move; None where that was none."""
    taken = int(said) if said.strip().isdecimal() else 0
    return pile - taken if 1 <= taken <= min(MOST, pile) else None
