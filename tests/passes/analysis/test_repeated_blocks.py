"""Which parameters belong to which repeated block, by names and shapes alone."""

from __future__ import annotations

from passes.analysis.repeated_blocks import blocks_of


def transformer(layers: int, prefix: str = "model.layers") -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.{k}.{name}": shape
        for k in range(layers)
        for name, shape in {"attention.weight": (4, 4), "mlp.weight": (8, 4), "mlp.bias": (8,)}.items()
    }


def test_layers_are_blocks() -> None:
    found = blocks_of({"model.embed.weight": (9, 4), **transformer(2)})
    assert found["model.embed.weight"] == ()
    assert found["model.layers.0.mlp.bias"] == ("model.layers.0",)
    assert found["model.layers.1.attention.weight"] == ("model.layers.1",)


def test_one_layer_repeats_nothing() -> None:
    assert set(blocks_of(transformer(1)).values()) == {()}


def test_layers_of_other_shapes_are_no_repetition() -> None:
    shapes = transformer(2) | {"model.layers.1.mlp.bias": (9,)}
    assert set(blocks_of(shapes).values()) == {()}


def test_the_linears_of_a_sequential_are_no_blocks() -> None:
    """One leaf module each."""
    assert set(blocks_of({f"net.{k}.{name}": (4,) for k in range(3) for name in ("weight", "bias")}).values()) == {()}


def test_blocks_in_blocks_are_named_from_the_outside() -> None:
    shapes = transformer(2, "stages.0.layers") | transformer(2, "stages.1.layers")
    assert blocks_of(shapes)["stages.1.layers.0.mlp.weight"] == ("stages.1", "stages.1.layers.0")


def test_siblings_are_compared_with_siblings_only() -> None:
    """The same layer in an encoder and in a decoder is not repeated."""
    assert set(blocks_of(transformer(1, "encoder.layers") | transformer(1, "decoder.layers")).values()) == {()}
