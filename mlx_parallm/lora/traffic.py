"""How the traffic of the model's own name is split, and by which rule a split ends. `Registry` has one of these.

Rewards come in from the threads of those who give them; what is served changes between two steps, as always. No MLX.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from mlx_parallm.arms import ArmStats, AutoSplit, Decision
from mlx_parallm.types import AdapterRoute

Serve = Callable[[Sequence[AdapterRoute]], None]


class Traffic:
    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.routes: Sequence[AdapterRoute] = ()  # empty: the model alone
        self._credits: list[float] = []  # what each route has due
        self._routing = threading.Lock()
        self.auto: AutoSplit | None = None  # the rule by which a split ends
        self.by_rule = False  # a rule decides what is served, or has decided it
        self.on_change: Callable[[], None] = lambda: None  # after each choice and decision
        self.on_reward: Callable[[], None] = lambda: None
        self.on_decision: Callable[[Decision], None] = lambda decision: None
        self._lock = threading.Lock()

    @property
    def compares(self) -> bool:
        """Whether rewards of what the model's own name answers are of use: several adapters share it, or a rule has
        chosen among them, after which clients go on sending rewards."""
        return len(self.routes) > 1 or self.by_rule

    def set_routes(self, routes: Sequence[AdapterRoute]) -> None:
        with self._routing:
            self.routes = list(routes)
            self._credits = [0.0] * len(routes)

    def next_route(self) -> AdapterRoute | None:
        """Each in turn, by its share."""
        with self._routing:
            if not self.routes:
                return None
            credits = [credit + route.share for credit, route in zip(self._credits, self.routes, strict=True)]
            place = max(range(len(credits)), key=credits.__getitem__)
            credits[place] -= 1.0
            self._credits = credits
            return self.routes[place]

    def serve(self, routes: Sequence[AdapterRoute], auto: AutoSplit | None) -> None:
        with self._lock:
            # no reward decides between the two
            before = self.auto
            self.auto = None
        try:
            self._serve(routes)
        except BaseException:
            with self._lock:
                self.auto = before
            raise
        with self._lock:
            self.auto = auto
            self.by_rule = auto is not None
            if auto is not None:
                auto.arms = {route.label: auto.arms.get(route.label, ArmStats()) for route in routes}
        self.on_change()

    def note_reward(self, stats: ArmStats | None, labels: Sequence[str], reward: float) -> None:
        """`stats`: of the version that answered; `labels`: what an arm may call it. A rule may decide by it."""
        with self._lock:
            if stats is not None:
                stats.add_reward(reward)
            decision = self._judged(labels, reward)
        self.on_reward()
        if decision is not None:
            self._decide(decision)

    def _judged(self, labels: Sequence[str], reward: float) -> Decision | None:
        auto = self.auto
        arm = None if auto is None else next((auto.arms[label] for label in labels if label in auto.arms), None)
        if auto is None or arm is None:
            return None
        arm.add_reward(reward)
        winner = auto.winner()
        if winner is None:
            return None
        self.auto = None
        return Decision(winner, auto)

    def _decide(self, decision: Decision) -> None:
        route = next((route for route in self.routes if route.label == decision.winner), None)
        if route is None:  # somebody has chosen otherwise meanwhile
            return
        routes = [] if route.name is None else [replace(route, share=1.0)]
        self._serve(routes)
        self.on_change()
        self.on_decision(decision)
