"""Shapes of the parameters of well-known models, for benchmarks of the optimizer step."""

from __future__ import annotations

Shape = tuple[int, ...]


def llama(hidden: int, intermediate: int, layers: int, key_value: int, vocabulary: int, tied: bool) -> list[Shape]:
    """Return the shapes of a Llama; ``key_value`` is the width of its key and value projections."""
    shapes: list[Shape] = [(vocabulary, hidden)]
    for _ in range(layers):
        shapes += [(hidden, hidden), (key_value, hidden), (key_value, hidden), (hidden, hidden)]
        shapes += [(intermediate, hidden), (hidden, intermediate), (intermediate, hidden), (hidden,), (hidden,)]
    return [*shapes, (hidden,), *([] if tied else [(vocabulary, hidden)])]


def gpt2() -> list[Shape]:
    """Return the shapes of GPT-2 124M, its vocabulary padded to 50,304."""
    width = 768
    shapes: list[Shape] = [(50304, width), (1024, width)]
    for _ in range(12):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width,), (width,)]


def resnet50() -> list[Shape]:
    """Return the shapes of ResNet-50: convolutions, batch norms and the classifier."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            shapes += [(4 * width, width, 1, 1), (4 * width,), (4 * width,)]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def shard(shapes: list[Shape], ranks: int) -> list[Shape]:
    """Return what the first of ``ranks`` FSDP ranks holds of each parameter."""
    return [(-(-shape[0] // ranks), *shape[1:]) for shape in shapes]


MODELS: dict[str, list[Shape]] = {
    "Llama-3.1-8B / 8": shard(llama(4096, 14336, 32, 1024, 128256, tied=False), 8),
    "Llama-3.2-1B": llama(2048, 8192, 16, 512, 128256, tied=True),
    "GPT-2 124M": gpt2(),
    "ResNet-50": resnet50(),
}

SMOKE_MODELS: dict[str, list[Shape]] = {
    "tiny Llama": llama(64, 96, 2, 32, 512, tied=True),
    "tiny convolutions": [(8, 3, 7, 7), (8,), (8, 8, 3, 3), (8,), (10, 8)],
}
