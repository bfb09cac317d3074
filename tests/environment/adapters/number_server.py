"""A server of OpenEnv: `number_server.py PORT SESSIONS`; a number of three digits is to be found."""

import random
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    number: int


class Hint(Observation):
    hint: str


class FindNumber(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._number = self._left = 0

    def reset(self, seed=None, episode_id=None, guesses=9, **more):
        self._number, self._left = random.Random(seed).randrange(100, 1000), guesses
        return Hint(hint=f"{guesses} guesses")

    def step(self, action, timeout_s=None, **more):
        self._left -= 1
        found = action.number == self._number
        if action.number == 13:
            raise RuntimeError("not that one")
        hint = "more" if action.number < self._number else "less"
        return Hint(hint=hint, reward=float(found), done=found or not self._left)

    @property
    def state(self):
        return State(step_count=self._left)


if __name__ == "__main__":
    app = create_fastapi_app(FindNumber, Guess, Hint, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, port=int(sys.argv[1]), log_level="warning", ws_ping_interval=0.5, ws_ping_timeout=0.5)
