"""The game: find a number from 1 to 6 in four guesses, each answered by `more` or `less`."""

HIGHEST = 6
GUESSES = 4
QUESTION = f"guess 1 to {HIGHEST}"


def hint(guess: str, secret: int) -> str:
    """Answer a wrong guess; a guess that is no number counts as too high."""
    return "more" if guess.isdecimal() and int(guess) < secret else "less"
