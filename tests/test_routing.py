"""Routing against plain Python and FP64, and at its edges; test_routing_families.py holds it to transformers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from warpring.errors import ArgumentError, UnsupportedError
from warpring.routing import Router

SOFTMAX = Router(4)
SOFTMAX_RAW = Router(4, renormalize=False)
SIGMOID = Router(4, "sigmoid")
SIGMOID_GROUPED = Router(4, "sigmoid", scaling_factor=2.5, num_groups=4, topk_groups=2)
SQRT_SOFTPLUS = Router(4, "sqrt_softplus", scaling_factor=1.5)
ALL = [SOFTMAX, SOFTMAX_RAW, SIGMOID, SIGMOID_GROUPED, SQRT_SOFTPLUS]
ALL_IDS = ["softmax", "softmax_raw", "sigmoid", "sigmoid_grouped", "sqrt_softplus"]
every_router = pytest.mark.parametrize("router", ALL, ids=ALL_IDS)

NAN, INF = math.nan, math.inf
# FP32 against FP32 through another order of operations: exp, a sum of at most 16 terms, a division, a product.
WEIGHT_RTOL = 2e-6
E = 32


def random_logits(seed: int, num_tokens: int = 48, num_experts: int = E, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) * scale


def random_bias(seed: int, num_experts: int = E) -> torch.Tensor:
    return torch.randn(num_experts, generator=torch.Generator().manual_seed(seed)) * 0.2


# --- plain Python and FP64 -------------------------------------------------------------------------------------------


def exact_weights(router: Router, logits: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """The weights' formula in FP64, written for one token at a time."""
    rows = []
    for row, ids in zip(logits.double().numpy(), topk_idx.tolist(), strict=True):
        if router.score_fn == "softmax":
            scores = np.exp(row - row.max())
            scores /= scores.sum()
        elif router.score_fn == "sigmoid":
            scores = 1 / (1 + np.exp(-row))
        else:
            scores = np.sqrt(np.log1p(np.exp(row)))
        chosen = scores[ids]
        rows.append((chosen / chosen.sum() if router.renormalize else chosen) * router.scaling_factor)
    return torch.from_numpy(np.stack(rows))


@every_router
def test_weights_follow_the_formula_in_fp64(router: Router) -> None:
    logits = random_logits(7, scale=3.0)
    topk_idx, topk_weights = router.route(logits)
    torch.testing.assert_close(topk_weights.double(), exact_weights(router, logits, topk_idx), rtol=WEIGHT_RTOL, atol=0)


@every_router
def test_weights_for_gives_the_weights_of_route(router: Router) -> None:
    logits = random_logits(8)
    topk_idx, topk_weights = router.route(logits)
    torch.testing.assert_close(router.weights_for(logits, topk_idx), topk_weights, rtol=WEIGHT_RTOL, atol=0)


def choose_in_python(choice: list[float], topk: int, num_groups: int, topk_groups: int) -> list[int]:
    """The rule of choice as sorted() states it: largest first, then lowest id; groups by their two best."""
    size = len(choice) // num_groups

    def group_score(group: int) -> float:
        return sum(sorted(choice[group * size : (group + 1) * size])[-2:])

    groups = range(num_groups)
    if num_groups > 1:
        groups = sorted(groups, key=lambda group: (-group_score(group), group))[:topk_groups]
    candidates = [group * size + member for group in sorted(groups) for member in range(size)]
    return sorted(candidates, key=lambda expert: (-choice[expert], expert))[:topk]


@pytest.mark.parametrize(("num_groups", "topk_groups"), [(1, 1), (4, 2), (8, 3), (8, 8), (16, 2)])
@pytest.mark.parametrize("levels", [1, 2, 3, 100])
def test_ties_go_to_the_lowest_id_and_the_lowest_group(num_groups: int, topk_groups: int, levels: int) -> None:
    router = Router(4, "sigmoid", num_groups=num_groups, topk_groups=topk_groups)
    generator = torch.Generator().manual_seed(9)
    for _ in range(20):
        # sigmoid(0) = 0.5 and eighths add exactly, so that a tie is a tie in Python's floats too.
        bias = torch.randint(0, levels, (E,), generator=generator) / 8
        topk_idx, _ = router.route(torch.zeros(2, E), bias)
        expected = choose_in_python((bias + 0.5).tolist(), 4, num_groups, topk_groups)
        assert topk_idx.tolist() == [expected, expected]


@pytest.mark.parametrize("num_experts", [4, 5, 17, 128, 1024])
def test_ties_of_softmax_go_to_the_lowest_id_at_any_number_of_experts(num_experts: int) -> None:
    logits = torch.randint(0, 3, (16, num_experts), generator=torch.Generator().manual_seed(10)).float()
    topk_idx, _ = SOFTMAX.route(logits)
    assert topk_idx.tolist() == [choose_in_python(row, 4, 1, 1) for row in logits.tolist()]


def test_zero_and_negative_zero_tie() -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 0.0, -1.0]])
    assert Router(3).route(logits)[0].tolist() == [[0, 1, 2]]


def test_softmax_keeps_the_order_of_logits_whose_probabilities_underflow_alike() -> None:
    logits = torch.tensor([[0.0, -400.0, -300.0, -200.0]])
    topk_idx, topk_weights = Router(3).route(logits)
    assert topk_idx.tolist() == [[0, 3, 2]]
    assert topk_weights.tolist() == [[1.0, 0.0, 0.0]]


def test_correction_bias_moves_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([0.0, 0.0, 0.0, 9.0])
    topk_idx, topk_weights = Router(2, "sigmoid", renormalize=False).route(logits, bias)
    assert topk_idx.tolist() == [[3, 0]]
    torch.testing.assert_close(topk_weights, torch.tensor([[0.5, 1 / (1 + math.exp(-3))]]))


def test_groups_confine_the_choice_even_where_a_chosen_group_has_a_bias_of_minus_infinity() -> None:
    router = Router(3, "sigmoid", num_groups=2, topk_groups=1)
    # Group 1 wins by its two best; its third place must go to an expert of its own, whatever that one's bias.
    bias = torch.tensor([0.1, 0.1, 0.1, 0.1, 5.0, 5.0, -INF, -INF])
    assert router.route(torch.zeros(1, 8), bias)[0].tolist() == [[4, 5, 6]]


def test_token_routes_alike_in_any_batch() -> None:
    logits = random_logits(11, num_tokens=33, num_experts=61)
    for router in (Router(8), Router(8, "sigmoid")):
        topk_idx, _ = router.route(logits)
        alone = torch.cat([router.route(logits[t : t + 1])[0] for t in range(33)])
        assert torch.equal(topk_idx, alone)


# --- NaN, infinities, extremes ---------------------------------------------------------------------------------------


@every_router
def test_nan_logits_give_ids_in_range_distinct_and_weights_that_show_the_nan(router: Router) -> None:
    logits = random_logits(12)
    logits[0] = NAN
    logits[1, 29] = NAN
    logits[2, 3:9] = -NAN
    # The same bits but the sign: x86 makes negative NaNs, a GPU positive ones.
    logits[3, 30] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    topk_idx, topk_weights = router.route(logits)

    assert topk_idx.min() >= 0
    assert topk_idx.max() < E
    assert all(len(set(ids)) == router.topk for ids in topk_idx.tolist())
    assert topk_idx[0].tolist() == ([0, 1, 2, 3])
    assert topk_idx[1, 0] == 29
    assert topk_idx[2].tolist() == [3, 4, 5, 6]
    assert topk_idx[3, 0] == 30
    assert topk_weights[:4].isnan().any(dim=-1).all()
    assert topk_weights[4:].isfinite().all()
    if router.renormalize or router.score_fn == "softmax":
        assert topk_weights[:4].isnan().all()


def test_nan_without_renormalising_stays_in_its_own_slot_for_sigmoid() -> None:
    logits = torch.tensor([[1.0, NAN, 2.0, 3.0]])
    topk_idx, topk_weights = Router(3, "sigmoid", renormalize=False).route(logits)
    assert topk_idx.tolist() == [[1, 3, 2]]
    assert topk_weights.isnan().tolist() == [[True, False, False]]


def test_nan_in_the_correction_bias_ranks_first_and_leaves_ids_in_range() -> None:
    bias = torch.zeros(8)
    bias[5] = NAN
    topk_idx, topk_weights = Router(3, "sigmoid").route(torch.zeros(2, 8), bias)
    assert topk_idx.tolist() == [[5, 0, 1]] * 2
    assert topk_weights.isfinite().all()


def test_expert_masked_by_minus_infinity_has_weight_zero() -> None:
    logits = torch.tensor([[1.0, -INF, -INF, -INF]])
    for router in (Router(2), Router(2, renormalize=False), Router(2, "sigmoid"), Router(2, "sqrt_softplus")):
        topk_idx, topk_weights = router.route(logits)
        assert topk_idx.tolist() == [[0, 1]]
        assert topk_weights[0, 1] == 0
        assert topk_weights[0, 0] > 0.7


def test_all_scores_underflowing_to_zero_give_zero_weights_and_not_nan() -> None:
    logits = torch.full((1, 6), -INF)
    for score_fn in ("sigmoid", "sqrt_softplus"):
        topk_idx, topk_weights = Router(3, score_fn).route(logits)
        assert topk_idx.tolist() == [[0, 1, 2]]
        assert topk_weights.tolist() == [[0.0, 0.0, 0.0]]


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[3e38, 1e38, -3e38, 0.0]])
    for router in (Router(2), Router(2, renormalize=False), Router(2, "sigmoid")):
        topk_idx, topk_weights = router.route(logits)
        assert topk_idx.tolist() == [[0, 1]]
        assert topk_weights.isfinite().all()


# --- shapes, dtypes, layouts -----------------------------------------------------------------------------------------


@every_router
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 519])
def test_any_number_of_tokens_gives_int32_ids_and_fp32_weights(router: Router, num_tokens: int) -> None:
    topk_idx, topk_weights = router.route(random_logits(13, num_tokens))
    assert (topk_idx.shape, topk_idx.dtype) == ((num_tokens, 4), torch.int32)
    assert (topk_weights.shape, topk_weights.dtype) == ((num_tokens, 4), torch.float32)


@every_router
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_of_any_float_dtype_are_read_as_fp32(router: Router, dtype: torch.dtype) -> None:
    logits = random_logits(14).to(dtype)
    for actual, expected in zip(router.route(logits), router.route(logits.float()), strict=True):
        assert torch.equal(actual, expected)


@every_router
def test_strided_logits_route_as_contiguous_ones(router: Router) -> None:
    logits = random_logits(15)
    strided = torch.full((2 * E, 48), NAN)
    strided[::2] = logits.mT
    for actual, expected in zip(router.route(strided[::2].mT), router.route(logits), strict=True):
        torch.testing.assert_close(actual, expected, rtol=WEIGHT_RTOL, atol=0)


@every_router
def test_routing_leaves_its_inputs_alone(router: Router) -> None:
    logits = random_logits(16)
    before = logits.clone()
    router.route(logits)
    router.weights_for(logits, torch.zeros(48, 2, dtype=torch.int32))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("router", [SIGMOID, SIGMOID_GROUPED, SQRT_SOFTPLUS], ids=lambda r: r.score_fn)
def test_no_correction_bias_means_a_bias_of_zero(router: Router) -> None:
    logits = random_logits(17)
    for actual, expected in zip(router.route(logits), router.route(logits, torch.zeros(E)), strict=True):
        assert torch.equal(actual, expected)


def test_topk_of_all_experts_is_allowed_and_one_more_is_not() -> None:
    logits = random_logits(18, num_experts=5)
    assert sorted(Router(5).route(logits)[0][0].tolist()) == [0, 1, 2, 3, 4]
    with pytest.raises(ArgumentError, match=r"Router\.route: logits .* topk = 6"):
        Router(6).route(logits)


@every_router
def test_nothing_is_read_on_the_host(router: Router) -> None:
    # A meta tensor has no data: whatever asked for a value would raise.
    logits = torch.empty(5, E, device="meta")
    bias = None if router.score_fn == "softmax" else torch.empty(E, device="meta")
    topk_idx, _ = router.route(logits, bias)
    assert router.weights_for(logits, topk_idx).shape == (5, 4)


# --- weights_for -----------------------------------------------------------------------------------------------------


@every_router
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_unused_slots_weigh_nothing_and_leave_the_others_as_if_absent(router: Router, dtype: torch.dtype) -> None:
    logits = random_logits(19)
    ids = torch.tensor([[3, 11, 30]]).expand(48, 3)
    padded = torch.tensor([[-1, 3, E, 11, -7, 30, 2**31 - 1]], dtype=dtype).expand(48, 7)
    weights = router.weights_for(logits, padded)
    assert (weights[:, [0, 2, 4, 6]] == 0).all()
    torch.testing.assert_close(weights[:, [1, 3, 5]], router.weights_for(logits, ids), rtol=WEIGHT_RTOL, atol=0)


@every_router
def test_token_without_a_used_slot_weighs_zero_even_with_nan_logits(router: Router) -> None:
    weights = router.weights_for(torch.full((2, E), NAN), torch.full((2, 4), -1))
    assert weights.tolist() == [[0.0] * 4] * 2


# --- rules and their messages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"topk": 0}, "topk must be at least 1; got 0"),
        ({"topk": 2, "score_fn": "tanh"}, "score_fn must be .* got 'tanh'"),
        ({"topk": 2, "scaling_factor": 0.0}, "scaling_factor must be finite and > 0; got 0.0"),
        ({"topk": 2, "scaling_factor": NAN}, "scaling_factor .* got nan"),
        ({"topk": 2, "scaling_factor": INF}, "scaling_factor .* got inf"),
        ({"topk": 2, "score_fn": "sigmoid", "topk_groups": 2}, "topk_groups must be 1 to num_groups = 1; got 2"),
        ({"topk": 2, "score_fn": "sigmoid", "num_groups": 4, "topk_groups": 0}, "topk_groups .* got 0"),
        ({"topk": 2, "num_groups": 4, "topk_groups": 2}, "num_groups must be 1 with score_fn 'softmax'; got 4"),
    ],
)
def test_description_that_breaks_a_rule_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^Router: {message}"):
        Router(**fields)


@pytest.mark.parametrize(
    ("router", "logits", "bias", "message"),
    [
        (SOFTMAX, torch.zeros(E), None, r"logits must be .* \[num_tokens, num_experts\]; got torch.float32 \[32\]"),
        (SOFTMAX, torch.zeros(2, 3, E), None, r"got torch.float32 \[2, 3, 32\]"),
        (SOFTMAX, torch.zeros(2, E, dtype=torch.int64), None, "got torch.int64"),
        (SOFTMAX, torch.zeros(2, 3), None, r"at least topk = 4 experts; got \[2, 3\]"),
        (SOFTMAX, torch.zeros(2, E), torch.zeros(E), "correction_bias must be None with score_fn 'softmax'"),
        (SIGMOID, torch.zeros(2, E), torch.zeros(E + 1), r"\[num_experts = 32\]; got torch.float32 \[33\]"),
        (SIGMOID, torch.zeros(2, E), torch.zeros(2, E), r"got torch.float32 \[2, 32\]"),
        (SIGMOID, torch.zeros(2, E), torch.zeros(E, dtype=torch.int32), "got torch.int32"),
        (SIGMOID, torch.zeros(2, E), torch.zeros(E, device="meta"), "must lie on cpu, .* got meta"),
        (SIGMOID_GROUPED, torch.zeros(2, 30), None, "30 experts must divide into num_groups = 4"),
        (SIGMOID_GROUPED, torch.zeros(2, 4), None, "groups of at least 2"),
        (Router(9, "sigmoid", num_groups=4, topk_groups=2), torch.zeros(2, 16), None, "hold topk = 9"),
    ],
)
def test_input_that_breaks_a_rule_is_refused(
    router: Router, logits: torch.Tensor, bias: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ArgumentError, match=f"^Router.route: .*{message}"):
        router.route(logits, bias)


def test_groups_that_just_hold_topk_are_allowed() -> None:
    topk_idx, _ = Router(8, "sigmoid", num_groups=4, topk_groups=2).route(random_logits(20, num_experts=16))
    groups = topk_idx // 4
    assert all(len(set(row)) == 2 for row in groups.tolist())


@pytest.mark.parametrize(
    ("topk_idx", "message"),
    [
        (torch.zeros(3, 2), "topk_idx must be int32 or int64; got torch.float32"),
        (torch.zeros(3, 2, dtype=torch.int16), "got torch.int16"),
        (torch.zeros(4, 2, dtype=torch.int64), r"\[num_tokens = 3, topk\] on cpu, .* got \[4, 2\] on cpu"),
        (torch.zeros(3, dtype=torch.int64), r"got \[3\] on cpu"),
        (torch.zeros(3, 2, dtype=torch.int64, device="meta"), "on meta"),
    ],
)
def test_ids_that_break_a_rule_are_refused(topk_idx: torch.Tensor, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"^Router.weights_for: .*{message}"):
        SOFTMAX.weights_for(torch.zeros(3, E), topk_idx)


# --- from_config -----------------------------------------------------------------------------------------------------


DEEPSEEK_FIELDS = {
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}


@pytest.mark.parametrize(
    ("config", "router"),
    [
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 8, "norm_topk_prob": True}, Router(8)),
        ({"model_type": "qwen3_moe", "num_experts_per_tok": 8, "norm_topk_prob": False}, Router(8, renormalize=False)),
        ({"model_type": "mixtral", "num_experts_per_tok": 2}, Router(2)),
        ({"model_type": "gpt_oss", "num_experts_per_tok": 4}, Router(4)),
        (
            {"model_type": "deepseek_v3", **DEEPSEEK_FIELDS},
            Router(8, "sigmoid", scaling_factor=2.5, num_groups=8, topk_groups=4),
        ),
        (
            {
                "model_type": "kimi_k2",
                **DEEPSEEK_FIELDS,
                "n_group": 1,
                "topk_group": 1,
                "routed_scaling_factor": 2.827,
            },
            Router(8, "sigmoid", scaling_factor=2.827),
        ),
        ({"model_type": "minimax_m2", "num_experts_per_tok": 8, "scoring_func": "sigmoid"}, Router(8, "sigmoid")),
        (
            {
                "model_type": "deepseek_v4",
                "num_experts_per_tok": 6,
                "scoring_func": "sqrtsoftplus",
                "routed_scaling_factor": 1.5,
            },
            Router(6, "sqrt_softplus", scaling_factor=1.5),
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_from_config_reads_a_parsed_config_json(config: dict[str, Any], router: Router) -> None:
    assert Router.from_config(config) == router
    assert Router.from_config({"model_type": "wrapper", "text_config": config}) == router


@pytest.mark.parametrize("name", [None, "llama", "deepseek_v2", "qwen3"])
def test_from_config_refuses_an_unknown_model_by_name(name: str | None) -> None:
    with pytest.raises(UnsupportedError, match=f"model_type must be one of .*qwen3_moe.*; got {name!r}"):
        Router.from_config({"model_type": name, **DEEPSEEK_FIELDS})


@pytest.mark.parametrize(
    "field", ["num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"]
)
def test_from_config_names_a_missing_field(field: str) -> None:
    config = {"model_type": "deepseek_v3", **DEEPSEEK_FIELDS}
    del config[field]
    with pytest.raises(ArgumentError, match=f"model_type 'deepseek_v3' must have '{field}'"):
        Router.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "topk_method", "greedy"),
        ("deepseek_v4", "scoring_func", "sigmoid"),
        ("minimax_m2", "scoring_func", "softmax"),
    ],
)
def test_from_config_refuses_another_way_of_routing_by_name(model_type: str, field: str, value: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{field}' must be .* for model_type '{model_type}'; got '{value}'"):
        Router.from_config({"model_type": model_type, **DEEPSEEK_FIELDS, field: value})


@pytest.mark.parametrize(("field", "value"), [("num_experts_per_tok", "8"), ("routed_scaling_factor", "2.5")])
def test_from_config_refuses_a_field_of_the_wrong_type(field: str, value: str) -> None:
    with pytest.raises(ArgumentError, match=f"'{field}' must be .*; got '{value}'"):
        Router.from_config({"model_type": "deepseek_v3", **DEEPSEEK_FIELDS, field: value})


# --- GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@every_router
def test_gpu_routes_ties_and_nans_as_the_cpu_does(router: Router) -> None:
    logits = torch.randint(-1, 2, (64, 512), generator=torch.Generator().manual_seed(21)).float()
    logits[3, 5] = NAN
    logits[4, 500] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)
    logits[5] = NAN
    expected_idx, expected_weights = router.route(logits)
    topk_idx, topk_weights = router.route(logits.cuda())
    assert torch.equal(topk_idx.cpu(), expected_idx)
    torch.testing.assert_close(topk_weights.cpu(), expected_weights, rtol=WEIGHT_RTOL, atol=0, equal_nan=True)


@pytest.mark.gpu
@every_router
def test_gpu_routing_is_captured_in_a_graph_and_follows_new_logits(router: Router) -> None:
    logits = random_logits(22).cuda()
    bias = None if router.score_fn == "softmax" else random_bias(23).cuda()
    router.route(logits, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        topk_idx, topk_weights = router.route(logits, bias)
    for seed in (24, 25):
        logits.copy_(random_logits(seed))
        graph.replay()
        expected_idx, expected_weights = router.route(logits, bias)
        assert torch.equal(topk_idx, expected_idx)
        assert torch.equal(topk_weights, expected_weights)
