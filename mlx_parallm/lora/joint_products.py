"""Rows' adapters added by a few operations, where passes are traced and each kernel that is started counts: on Metal.

Layers that read the same inputs share one product with all their adapters' A side by side; each then adds its own part
times B to its output in one operation. Every layer's weights are arrays of their own, made once where adapters are put
together: a trace that cut them out of larger ones would do so at every step. Where a pass has one token of each row, a
kernel of ours may do all of that, and read each row's own adapter alone; `devices.metal.check` says whether it pays.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from mlx_parallm.devices.metal.check import is_worth_using
from mlx_parallm.devices.metal.kernels import SMALLEST, add_own_lora
from mlx_parallm.devices.metal.sources import MAX_RANK
from mlx_parallm.lora.hooks import AdapterKernels, LayerOutput, LayerPlace
from mlx_parallm.lora.row_adapters import AdapterStack, Groups, Rows, StackedLoRA

Layers = tuple[LayerPlace, ...]  # that read the same inputs


@dataclass(frozen=True, slots=True, eq=False)
class JointProduct:
    """What adapters add to layers that read the same inputs."""

    a: mx.array  # (K, layers * C)
    b: tuple[mx.array, ...]  # of each layer (C, out_features)


Products = Mapping[Layers, JointProduct]


@dataclass(slots=True, eq=False)
class JointStack(AdapterStack):
    """A stack whose layers' weights are arrays of their own. Layers with DoRA, and embeddings, stay in their groups."""

    inputs: Sequence[Layers] = ()  # all linear layers, by the inputs that they share
    products: Products = field(default_factory=dict)
    joined: frozenset[int] = frozenset()  # the groups in `products`

    def __post_init__(self) -> None:
        AdapterStack.__post_init__(self)
        linear = {group for layers in self.inputs for group, _ in layers}
        self.joined = frozenset(number for number in linear & self.groups.keys() if self.groups[number][2] is None)
        self.products = self._products()
        mx.async_eval([array for product in self.products.values() for array in (product.a, *product.b)])

    def for_rows(self, rows: Rows, masked: bool = False) -> "JointLoRA":
        rest: Groups = {number: group for number, group in self.groups.items() if number not in self.joined}
        mask = self.mask(rows, masked)
        widest = max((len(layers) for layers in self.products), default=0)
        masks = () if mask is None else tuple(mx.tile(mask[:, 0], (1, count)) for count in range(1, widest + 1))
        spans = np.zeros((max(len(rows), SMALLEST // 2), 2), np.int32)
        spans[: len(rows)] = self.spans(rows)
        max_rank = max(member.rank for member in self.members)
        stacked = StackedLoRA(rest, mask, self.numbers(rows))
        return JointLoRA(self.joined, self.products, masks, mx.array(spans), max_rank <= MAX_RANK, stacked)

    def _products(self) -> Products:
        """Cuts each group into its layers, and puts those beside each other that share inputs."""
        cut = {group: [mx.split(side, len(side)) for side in self.groups[group][:2]] for group in self.joined}
        products = {}
        for inputs in self.inputs:
            layers = tuple(place for place in inputs if place[0] in self.joined)
            if layers:
                a, b = ([cut[group][side][number].squeeze(0) for group, number in layers] for side in (0, 1))
                products[layers] = JointProduct((a[0] if len(a) == 1 else mx.concatenate(a)).T, tuple(b))
        return products


@dataclass(frozen=True, slots=True, eq=False)
class JointLoRA:
    """Rows over a `JointStack`, for passes that are traced."""

    joined: frozenset[int]
    products: Products
    masks: tuple[mx.array, ...]  # (B, layers * C) for one layer, two …: which columns are a row's own; () for all
    spans: mx.array  # (B or more, 2): where a row's own columns begin, and how many there are
    of_low_rank: bool  # so that a kernel may take them
    rest: StackedLoRA  # what MLX's operations add layer by layer

    def has(self, group: int) -> bool:
        return group in self.joined or self.rest.has(group)

    def without_dora(self, group: int) -> bool:
        return group in self.joined or self.rest.without_dora(group)

    def add_to_linear(self, group: int, number: int, x: mx.array, y: mx.array, bias: mx.array | None) -> mx.array:
        if x.ndim == 3:
            return self.rest.add_to_linear(group, number, x, y, bias)
        return self.rest.add_to_linear(group, number, x[:, None], y[:, None], bias)[:, 0]

    def add_to_embedding(self, group: int, number: int, tokens: mx.array, y: mx.array) -> mx.array:
        return self.rest.add_to_embedding(group, number, tokens, y)

    @property
    def form(self) -> Hashable:
        """Equal for those that a traced pass can take in turn."""
        columns = next(iter(self.products.values())).b[0].shape[0] if self.products else 0
        return self.joined, columns, len(self.masks), self.of_low_rank, self.rest.form

    def arrays(self) -> list[mx.array]:
        joint = [array for product in self.products.values() for array in (product.a, *product.b)]
        return [*joint, *self.masks, self.spans, *self.rest.arrays()]

    def maker(self) -> "Callable[[Sequence[mx.array]], JointLoRA]":
        """Makes the same of other arrays, given in the order of `arrays`; holds on to none of this one's."""
        joined = self.joined
        inputs = list(self.products)
        masks = len(self.masks)
        of_low_rank = self.of_low_rank
        make_rest = self.rest.maker()

        def make(arrays: Sequence[mx.array]) -> JointLoRA:
            unused = iter(arrays)
            products = {layers: JointProduct(next(unused), tuple(next(unused) for _ in layers)) for layers in inputs}
            own = tuple(next(unused) for _ in range(masks))
            return JointLoRA(joined, products, own, next(unused), of_low_rank, make_rest(list(unused)))

        return make

    def row(self, number: int) -> "JointLoRA":
        masks = tuple(mask[number : number + 1] for mask in self.masks)
        spans = self.spans[mx.array([number] * (SMALLEST // 2))]
        return JointLoRA(self.joined, self.products, masks, spans, self.of_low_rank, self.rest.row(number))


def add_jointly(
    x: mx.array, layers: Sequence[LayerOutput], row_adapters: JointLoRA, by_kernel: bool = False
) -> list[mx.array] | None:
    """Adds rows' own low-rank products to the outputs of layers that read the same x, (B, K) or (B, T, K)."""
    product = row_adapters.products.get(tuple((group, number) for _, group, number in layers))
    if product is None:
        return None
    if by_kernel and x.ndim == 2 and row_adapters.of_low_rank:
        outputs = [(y, b) for (y, _, _), b in zip(layers, product.b, strict=True)]
        sums = add_own_lora(x, product.a.T, outputs, row_adapters.spans)
        if sums is not None:
            return sums
    z = x @ product.a
    if row_adapters.masks:
        mask = row_adapters.masks[len(layers) - 1]
        z = mx.where(mask if x.ndim == 2 else mask[:, None], z, 0.0)  # what is not its own may be infinite
    parts = mx.split(z, len(layers), axis=-1) if len(layers) > 1 else [z]
    return [mx.addmm(y, part, b) for (y, _, _), part, b in zip(layers, parts, product.b, strict=True)]


BY_OPERATIONS = AdapterKernels(add=add_jointly, by_operations=True)
BY_KERNEL = AdapterKernels(add=functools.partial(add_jointly, by_kernel=True), by_operations=True)
TRIED_ROWS = 4
TRIED_RANK = 16


def joint_kernels(sizes: Sequence[tuple[int, int]], dtype: mx.Dtype) -> AdapterKernels:
    """Returns what adds adapters to layers of these (inputs, outputs), which share their inputs: the faster way."""
    size = sizes[0][0]
    columns = 2 * TRIED_RANK

    def normal(*shape: int) -> mx.array:
        return (mx.random.normal(shape, key=mx.random.key(sum(shape))) / 4).astype(dtype)

    def resident(rows: int) -> JointLoRA:
        layers = tuple((group, 0) for group in range(len(sizes)))
        weights = [normal(columns, size) for _ in sizes]
        product = JointProduct(mx.concatenate(weights).T, tuple(normal(columns, out) for _, out in sizes))
        spans = mx.array([(TRIED_RANK * (row % 2), TRIED_RANK) for row in range(rows)], mx.int32)
        own = (mx.arange(columns)[None] // TRIED_RANK) == (mx.arange(rows)[:, None] % 2)
        masks = tuple(mx.tile(own, (1, count)) for count in range(1, len(sizes) + 1))
        return JointLoRA(frozenset(range(len(sizes))), {layers: product}, masks, spans, True, StackedLoRA())

    x = normal(TRIED_ROWS, size)
    layers = [(normal(TRIED_ROWS, out), group, 0) for group, (_, out) in enumerate(sizes)]
    row_adapters = resident(TRIED_ROWS)

    def added(by_kernel: bool) -> list[mx.array]:
        sums = add_jointly(x, layers, row_adapters, by_kernel=by_kernel)
        assert sums is not None
        return sums

    worth = is_worth_using("adapters", lambda: added(True), lambda: added(False))
    return BY_KERNEL if worth else BY_OPERATIONS
