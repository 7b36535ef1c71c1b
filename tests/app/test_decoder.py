"""The demo model: sizes, numbers, initialisation and sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from shardwright.app.models import PRESETS, Block, Decoder, DecoderConfig, num_parameters, rotate
from shardwright.app.models import rotary_table as table
from shardwright.core.errors import SpecError

SHAPE = DecoderConfig(
    vocab_size=61,
    hidden=32,
    layers=3,
    heads=4,
    kv_heads=2,
    ffn_hidden=48,
    max_seq_len=64,
)


def tokens(batch: int = 2, length: int = 16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, SHAPE.vocab_size, (batch, length), generator=generator)


@pytest.mark.parametrize(
    ("preset", "published"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_llama_presets_have_the_published_parameter_counts(preset: str, published: int) -> None:
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    assert num_parameters(model.parameters()) == published
    assert PRESETS[preset].num_parameters == published


@pytest.mark.parametrize("preset", ["tiny", "small", "medium"])
def test_the_formula_counts_the_parameters_of_every_preset(preset: str) -> None:
    with torch.device("meta"):
        model = Decoder(PRESETS[preset])
    assert PRESETS[preset].num_parameters == num_parameters(model.parameters())


def test_the_small_presets_are_of_their_class() -> None:
    assert 0.8e6 < PRESETS["tiny"].num_parameters < 2e6
    assert 25e6 < PRESETS["small"].num_parameters < 27e6
    assert 105e6 < PRESETS["medium"].num_parameters < 115e6


def test_tied_embeddings_are_one_parameter_counted_once() -> None:
    tied = replace(SHAPE, tie_embeddings=True)
    model = Decoder(tied)
    assert model.lm_head.weight is model.embed_tokens.weight
    assert num_parameters(model.parameters()) == tied.num_parameters
    assert SHAPE.num_parameters - tied.num_parameters == SHAPE.vocab_size * SHAPE.hidden


def test_layers_are_blocks_and_nothing_has_a_bias() -> None:
    model = Decoder(SHAPE)
    assert all(isinstance(layer, Block) for layer in model.layers)
    assert len(model.layers) == SHAPE.layers
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert not list(model.buffers())


def test_matrix_products_counted_by_torch_match_the_formula() -> None:
    model, inputs = Decoder(SHAPE), tokens()
    with FlopCounterMode(display=False) as counter:
        model(inputs, inputs).backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert products == 6 * SHAPE.matmul_numel * inputs.numel()


def test_attention_flops_average_the_keys_a_token_sees() -> None:
    seq_len = 10
    seen = sum(range(1, seq_len + 1)) / seq_len
    per_key = 3 * 2 * 2 * SHAPE.hidden  # backward costs twice the forward; scores and values
    expected = 6 * SHAPE.matmul_numel + SHAPE.layers * per_key * seen
    assert SHAPE.flops_per_token(seq_len) == expected


def test_loss_is_the_mean_cross_entropy_in_fp32() -> None:
    model, inputs = Decoder(SHAPE).to(torch.bfloat16), tokens()
    logits, loss = model(inputs), model(inputs, inputs)
    assert logits.dtype == torch.bfloat16
    assert logits.shape == (*inputs.shape, SHAPE.vocab_size)
    assert loss.dtype == torch.float32
    assert loss.ndim == 0
    torch.testing.assert_close(
        loss, F.cross_entropy(logits.float().flatten(0, 1), inputs.flatten())
    )


def test_an_untrained_model_guesses() -> None:
    loss = Decoder(SHAPE)(tokens(8, 32), tokens(8, 32, seed=1))
    assert loss.item() == pytest.approx(math.log(SHAPE.vocab_size), abs=0.05)


def test_a_token_changes_no_earlier_output() -> None:
    model, inputs = Decoder(SHAPE), tokens()
    changed = inputs.clone()
    changed[:, 9] = (changed[:, 9] + 1) % SHAPE.vocab_size
    before, after = model(inputs), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_grouped_heads_equal_full_heads_that_repeat_keys_and_values() -> None:
    grouped, inputs = Decoder(SHAPE), tokens()
    full = Decoder(replace(SHAPE, kv_heads=SHAPE.heads))
    state = grouped.state_dict()
    for name in state:
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = state[name].view(SHAPE.kv_heads, SHAPE.head_dim, SHAPE.hidden)
            state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(inputs), full(inputs))


def test_rotated_products_depend_on_distance_alone() -> None:
    query, key = torch.randn(2, 1, 1, 1, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = table(300, 16, 10_000.0, torch.device("cpu"))

    def product(query_position: int, key_position: int) -> float:
        turned = [
            rotate(x, cos[position, None], sin[position, None])
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(7, 3) == pytest.approx(product(280, 276), abs=1e-4)
    assert product(7, 3) != pytest.approx(product(7, 5), abs=1e-3)


def test_positions_stay_exact_in_a_bf16_model() -> None:
    x = torch.randn(1, 1, 2048, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = table(2048, 16, 10_000.0, torch.device("cpu"))
    model = Decoder(SHAPE).to(torch.bfloat16)
    assert not list(model.buffers()), "no table that a cast of the module could blur"
    rounded = rotate(x.bfloat16(), cos, sin)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), rotate(x, cos, sin), atol=0.03, rtol=0.01)


def test_the_same_seed_gives_the_same_parameters_and_another_does_not() -> None:
    one, same, other = (Decoder(SHAPE, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


def test_a_parameter_starts_the_same_whatever_else_the_model_holds() -> None:
    torch.manual_seed(5)
    deep = Decoder(SHAPE).state_dict()
    shallow = Decoder(replace(SHAPE, layers=1)).state_dict()
    same = "layers.0.self_attn.q_proj.weight"
    assert torch.equal(deep[same], shallow[same])


def test_a_model_built_on_meta_can_be_initialised_later() -> None:
    with torch.device("meta"):
        late = Decoder(SHAPE)
    late.to_empty(device="cpu").init_parameters(seed=0)
    early = Decoder(SHAPE, seed=0).state_dict()
    assert all(torch.equal(value, early[name]) for name, value in late.state_dict().items())


def test_projections_to_the_residual_stream_start_smaller() -> None:
    state = Decoder(replace(SHAPE, hidden=128, ffn_hidden=256, layers=8)).state_dict()
    assert float(state["layers.0.self_attn.q_proj.weight"].std()) == pytest.approx(0.02, rel=0.05)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        std = float(state[f"layers.0.{name}.weight"].std())
        assert std == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert bool((state["layers.0.input_layernorm.weight"] == 1).all())


def test_sampling_is_reproducible_and_keeps_the_prompt() -> None:
    model, prompt = Decoder(SHAPE), tokens(2, 4)

    def sample() -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        return model.generate(prompt, 6, temperature=0.8, top_k=5, generator=generator)

    first = sample()
    assert first.shape == (2, 10)
    assert torch.equal(first[:, :4], prompt)
    assert torch.equal(first, sample())


def test_temperature_zero_and_top_one_take_the_likeliest_token() -> None:
    model, prompt = Decoder(SHAPE), tokens(1, 4)
    greedy = model.generate(prompt, 5, temperature=0)
    assert torch.equal(greedy, model.generate(prompt, 5, top_k=1))
    assert int(greedy[0, 4]) == int(model(prompt)[0, -1].argmax())


def test_generation_goes_on_beyond_the_longest_sequence() -> None:
    model = Decoder(replace(SHAPE, max_seq_len=8))
    assert model.generate(tokens(1, 8), 4, temperature=0).shape == (1, 12)


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(SpecError, match="max_seq_len=64 tokens; found 65"):
        Decoder(SHAPE)(tokens(1, 65))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 3}, "hidden must be a multiple"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"layers": 0}, "layers must be greater than 0"),
        ({"norm_eps": -1.0}, "norm_eps must be greater than 0"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        replace(SHAPE, **change)
