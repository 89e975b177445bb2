"""LSTM and GRU with torch's weights: several layers, both directions, order of the gates, two biases.

Input (batch, time, features), or (batch, features) for a single step, as policies take it. State, where it is given or
asked for, is (batch, layers · directions, hidden_size): torch's with the batch first.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import mlx.core as mx

from mlx_parallm.errors import ModelLoadError
from mlx_parallm.models.networks.layer import Layer, Shape, ShapeError, Weights, check_features
from mlx_parallm.models.networks.layer_options import Count, Flag, NotNegative

State = tuple[mx.array, ...]  # (batch, hidden_size) each: h, and for an LSTM c


class Recurrent(Layer, ABC):
    gates: ClassVar[int]
    hidden_size: Count
    input_size: Count | None = None
    num_layers: Count = 1
    bidirectional: Flag = False
    bias: Flag = True
    batch_first: Flag = True
    dropout: NotNegative = 0.0  # of training

    def model_post_init(self, context: Any) -> None:
        if not self.batch_first:
            raise ModelLoadError(
                "batch_first is false: the first axis is the batch in every network here, so leave it out; the weights "
                "are the same, only inputs must be (batch, time, features)"
            )

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    def _names(self) -> list[str]:
        """The endings of tensors' names, in the order of the state."""
        endings = ("", "_reverse") if self.bidirectional else ("",)
        return [f"_l{layer}{ending}" for layer in range(self.num_layers) for ending in endings]

    def tensors(self, *inputs: Shape) -> dict[str, Shape]:
        if self.input_size is None:
            self.input_size = inputs[0][-1]
        rows = self.gates * self.hidden_size
        found: dict[str, Shape] = {}
        for place, ending in enumerate(self._names()):
            width = self.input_size if place < self.directions else self.hidden_size * self.directions
            found[f"weight_ih{ending}"] = (rows, width)
            found[f"weight_hh{ending}"] = (rows, self.hidden_size)
            if self.bias:
                found[f"bias_ih{ending}"] = found[f"bias_hh{ending}"] = (rows,)
        return found

    def shapes(self, *inputs: Shape) -> tuple[Shape, ...]:
        given = inputs[0]
        if len(given) not in (2, 3):
            raise ShapeError(
                f"takes (batch, time, features) or, for one step, (batch, features), not {len(given)} axes"
            )
        check_features(given[-1], self.input_size or given[-1], "features")
        state = (given[0], self.num_layers * self.directions, self.hidden_size)
        for other in inputs[1:]:
            if other != state:
                raise ShapeError(f"takes a state of (batch, {state[1]}, {state[2]}) and is given {other}")
        return (*given[:-1], self.hidden_size * self.directions), *(state,) * len(self.extra)

    def results(self, weights: Weights, *inputs: mx.array) -> tuple[mx.array, ...]:
        one_step = inputs[0].ndim == 2
        steps = inputs[0][:, None] if one_step else inputs[0]  # (B, T, F)
        states = inputs[1:] or [mx.zeros((steps.shape[0], len(self._names()), self.hidden_size))] * len(self.extra)
        last: list[State] = []
        for layer in range(self.num_layers):
            outputs = []
            for place in range(layer * self.directions, (layer + 1) * self.directions):
                state = tuple(one[:, place] for one in states)
                found, end = self._scan(
                    weights, self._names()[place], steps, state, backwards=place % self.directions == 1
                )
                outputs.append(found)
                last.append(end)
            steps = outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)
        ends = [mx.stack([state[kind] for state in last], axis=1) for kind in range(len(self.extra))]
        return steps[:, 0] if one_step else steps, *ends

    def _scan(
        self, weights: Weights, ending: str, steps: mx.array, state: State, backwards: bool
    ) -> tuple[mx.array, State]:
        """One layer in one direction: (B, T, H) and the state at its end."""
        inward = steps @ weights[f"weight_ih{ending}"].T  # all steps at once
        if self.bias:
            inward = inward + weights[f"bias_ih{ending}"]
        weight = weights[f"weight_hh{ending}"].T
        bias = weights.get(f"bias_hh{ending}")
        outputs: list[mx.array] = []
        order = range(steps.shape[1])
        for time in reversed(order) if backwards else order:
            onward = state[0] @ weight if bias is None else mx.addmm(bias, state[0], weight)
            state = self._step(inward[:, time], onward, state)
            outputs.append(state[0])
        return mx.stack(outputs[::-1] if backwards else outputs, axis=1), state

    @abstractmethod
    def _step(self, inward: mx.array, onward: mx.array, state: State) -> State:
        """Returns what the step's input and the state before it make of the state; both are products with all gates."""


class LSTM(Recurrent):
    gates: ClassVar[int] = 4
    arity: ClassVar[tuple[int, ...]] = (1, 3)
    extra: ClassVar[tuple[str, ...]] = ("h", "c")

    def _step(self, inward: mx.array, onward: mx.array, state: State) -> State:
        keep_in, forget, new, out = mx.split(inward + onward, 4, axis=-1)
        cell = mx.sigmoid(forget) * state[1] + mx.sigmoid(keep_in) * mx.tanh(new)
        return mx.sigmoid(out) * mx.tanh(cell), cell


class GRU(Recurrent):
    gates: ClassVar[int] = 3
    arity: ClassVar[tuple[int, ...]] = (1, 2)
    extra: ClassVar[tuple[str, ...]] = ("h",)

    def _step(self, inward: mx.array, onward: mx.array, state: State) -> State:
        reset_in, update_in, new_in = mx.split(inward, 3, axis=-1)
        reset_on, update_on, new_on = mx.split(onward, 3, axis=-1)
        update = mx.sigmoid(update_in + update_on)
        new = mx.tanh(new_in + mx.sigmoid(reset_in + reset_on) * new_on)
        return ((1 - update) * new + update * state[0],)
