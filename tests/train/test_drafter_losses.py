"""Losses of every method, and soft labels, against slow ones of the formulas."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.errors import SpecDecError
from specdec.methods.eagle import Eagle3Params
from specdec.model.config import ModelConfig
from specdec.train import features as features_module
from specdec.train.features import Features, OutputHead, TargetShape
from specdec.train.loss import Measures, Teacher, compute_loss, measure_positions, rank_labels
from specdec.train.methods.base import TrainableDrafter, choose_mask_token
from specdec.train.methods.dflash import DFlash
from specdec.train.methods.eagle_parts.nets import Eagle1, Eagle3, make_mask
from specdec.train.methods.medusa import Medusa
from specdec.train.methods.redrafter import RecurrentDrafter
from specdec.train.settings import TrainSettings

HIDDEN, VOCAB, HEADS, KV_HEADS, HEAD_SIZE, STEPS = 8, 11, 2, 1, 4, 3
MODEL = ModelConfig(
    architecture="LlamaForCausalLM", dtype="float32", vocab_size=VOCAB, hidden_size=HIDDEN,
    num_hidden_layers=1, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
    head_size=HEAD_SIZE, intermediate_size=6, norm_epsilon=1e-5, max_position_embeddings=32,
    rotary_base=100.0,
)  # fmt: skip
NUM_AUXILIARY = 2
MASK_ROW = torch.linspace(-1, 1, HIDDEN)
NORMS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3-input-norm": {"norm_before_fc": True, "norm_output": True},
    "eagle3-fc-norm": {"fc_norm": True},
    "p-eagle": {"fc_norm": True, "mask_token_id": 2},
}
REDRAFTERS: dict[str, dict[str, Any]] = {
    "redrafter": dict(redrafter_num_layers=2),
    "redrafter-sum": dict(redrafter_rnn=False, redrafter_num_layers=1),
    "redrafter-projected": dict(redrafter_num_layers=1, redrafter_exit_dim=7),
    "redrafter-decay": dict(redrafter_num_layers=0, redrafter_loss_decay=0.5),
}
DRAFTERS = (
    *REDRAFTERS,
    "medusa",
    "medusa-2",
    "medusa-soft",
    "eagle",
    "eagle-2-layers",
    *NORMS,
    "dflash",
    "dspark",
)


def make_head() -> OutputHead:
    generator = torch.Generator().manual_seed(5)
    return OutputHead(torch.randn(VOCAB, HIDDEN, generator=generator))


def make_recipe(**options: Any) -> TrainSettings:
    """EAGLE's."""
    return TrainSettings(**{"eagle_token_weight": 0.3, "eagle_noise": 0.0, **options})


def make_drafter(kind: str) -> TrainableDrafter:
    torch.manual_seed(0)
    drafter: TrainableDrafter
    if kind in REDRAFTERS:
        options = TrainSettings(redrafter_predict_n_tokens=STEPS, **REDRAFTERS[kind])
        drafter = RecurrentDrafter(options, TargetShape(hidden_size=HIDDEN, vocab_size=VOCAB))
    elif kind.startswith("medusa"):
        options = TrainSettings(
            medusa_num_heads=STEPS, medusa_num_layers=2 if kind == "medusa-2" else 1,
            self_distillation=0.4 if kind == "medusa-soft" else 0.0,
        )  # fmt: skip
        drafter = Medusa(options, make_head())
    elif kind in ("dflash", "dspark"):
        rank = 3 if kind == "dspark" else 0
        options = TrainSettings(
            dflash_block_size=STEPS + (not rank), dflash_num_anchors=9, dflash_loss_decay=0.8,
            self_distillation=0.6, dflash_markov_rank=rank,
        )  # fmt: skip
        drafter = DFlash(
            options, ModelConfig(**{**vars(MODEL), "num_hidden_layers": 2}), embedding_scale=1.5,
            num_auxiliary=NUM_AUXILIARY, mask_row=MASK_ROW, mask_token_id=2,
        )  # fmt: skip
    else:
        recipe = make_recipe(self_distillation=1.0 if kind in NORMS else 0.6)
        model = MODEL
        if kind == "eagle-2-layers":
            model = ModelConfig(**{**vars(MODEL), "num_hidden_layers": 2})
        if kind in NORMS:
            params = Eagle3Params(
                aux_layers=tuple(range(NUM_AUXILIARY)), draft_vocab_size=VOCAB,
                norm_before_residual=False, **NORMS[kind],
            )  # fmt: skip
            mask_row = MASK_ROW if params.mask_token_id is not None else None
            drafter = Eagle3(recipe, model, make_head(), params, mask_row=mask_row)
        else:
            drafter = Eagle1(recipe, model)
    with torch.no_grad():  # what begins as zero, one or a copy is told apart
        for parameter in drafter.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return drafter


def make_batch(num_rows: int = 2, length: int = 8) -> tuple[Features, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(width: int) -> Tensor:
        return torch.randn(num_rows, length, width, generator=generator)

    features = Features(
        tokens=torch.randint(0, VOCAB, (num_rows, length), generator=generator),
        hidden=draw(HIDDEN),
        embedded=draw(HIDDEN),
        head=make_head(),
        auxiliary=draw(NUM_AUXILIARY * HIDDEN),
    )
    return features, torch.rand(num_rows, length, generator=generator) < 0.7


def normalize(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + MODEL.norm_epsilon).sqrt() * weight


def rotate_by(x: Tensor, position: int) -> Tensor:
    """One head's vector, pair by pair as complex numbers."""
    half = HEAD_SIZE // 2
    out = x.clone()
    for i in range(half):
        angle = position / MODEL.rotary_base ** (2 * i / HEAD_SIZE)
        cos, sin = math.cos(angle), math.sin(angle)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return out


def run_layer(
    weights: dict[str, Tensor], index: int, inputs: list[Tensor], embedded: list[Tensor]
) -> list[Tensor]:
    """A decoder layer over one sequence, token after token, as an engine runs it."""

    def get(name: str) -> Tensor:
        return weights[f"layers.{index}.{name}.weight"]

    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs = []
    for position, (x, e) in enumerate(zip(inputs, embedded, strict=True)):
        entered = x
        if f"layers.{index}.hidden_norm.weight" in weights:
            normed = normalize(e, get("input_layernorm"))
            entered = torch.cat((normed, normalize(x, get("hidden_norm"))))
        elif f"layers.{index}.input_layernorm.weight" in weights:
            entered = normalize(x, get("input_layernorm"))
        q, k, v = (get(f"self_attn.{name}_proj") @ entered for name in "qkv")
        keys.append(rotate_by(k, position))
        values.append(v)
        attended = []
        for head in range(HEADS):  # all of them share the one key/value head
            query = rotate_by(q[head * HEAD_SIZE : (head + 1) * HEAD_SIZE], position)
            scores = torch.stack([query @ key for key in keys]) / HEAD_SIZE**0.5
            attended.append(scores.softmax(0) @ torch.stack(values))
        x = x + get("self_attn.o_proj") @ torch.cat(attended)
        normed = normalize(x, get("post_attention_layernorm"))
        gate = get("mlp.gate_proj") @ normed
        gated = gate / (1 + torch.exp(-gate)) * (get("mlp.up_proj") @ normed)
        outputs.append(x + get("mlp.down_proj") @ gated)
    return outputs


def draft_eagle(
    weights: dict[str, Tensor], features: Features, row: int, place: int, *, norms_output: bool
) -> list[Tensor]:
    """Guesses of one draft: true pairs up to `place`, then the drafter's own."""
    is_third = "norm.weight" in weights
    if is_third:
        read = list(features.auxiliary[row, : place + 1])
        if "mask_hidden" in weights:
            read.append(weights["mask_hidden"][0, 0])
        if "input_norm.weight" in weights:
            read = [normalize(a, weights["input_norm.weight"]) for a in read]
        if "fc_norm.0.weight" in weights:
            norms = [weights[f"fc_norm.{part}.weight"] for part in range(NUM_AUXILIARY)]
            read = [
                torch.cat([normalize(p, w) for p, w in zip(a.split(HIDDEN), norms, strict=True)])
                for a in read
            ]
        states = [weights["fc.weight"] @ a for a in read]
    else:
        states = list(features.hidden[row, : place + 1])
    guesses = []
    mask = states.pop() if "mask_hidden" in weights else None
    for step in range(STEPS):
        if place + 2 + step >= features.tokens.shape[1]:
            break
        embedded = [features.embedded[row, 1 + i] for i in range(len(states))]
        if mask is not None:
            embedded[place + 1 :] = [MASK_ROW] * step
        x = states
        if not is_third:
            x = [
                weights["fc.weight"] @ torch.cat((e, s)) + weights["fc.bias"]
                for e, s in zip(embedded, states, strict=True)
            ]
        for index in range(2 if "layers.1.mlp.up_proj.weight" in weights else 1):
            x = run_layer(weights, index, x, embedded)
        if norms_output:
            x = [normalize(each, weights["norm.weight"]) for each in x]
        guesses.append(x[-1])
        states = [*states, x[-1] if mask is None else mask]
    return guesses


def draft_dflash(
    weights: dict[str, Tensor], features: Features, row: int, place: int
) -> list[Tensor]:
    """Guesses of one block, at the token after `place`; slot by slot, head by head."""
    context = [
        normalize(weights["fc.weight"] @ a, weights["hidden_norm.weight"])
        for a in features.auxiliary[row, : place + 1]
    ]
    mask = MASK_ROW
    is_spark = "markov_head.markov_w1.weight" in weights
    block = [1.5 * features.embedded[row, place + 1], *[1.5 * mask] * (STEPS - is_spark)]
    for index in range(2):

        def get(name: str, index: int = index) -> Tensor:
            return weights[f"layers.{index}.{name}.weight"]

        entered = [*context, *(normalize(x, get("input_layernorm")) for x in block)]
        keys = [
            rotate_by(normalize(get("self_attn.k_proj") @ e, get("self_attn.k_norm")), position)
            for position, e in enumerate(entered)
        ]
        values = torch.stack([get("self_attn.v_proj") @ e for e in entered])
        outputs = []
        for slot, x in enumerate(block):
            position = place + 1 + slot
            attended = []
            for q in (get("self_attn.q_proj") @ entered[position]).view(-1, HEAD_SIZE):
                query = rotate_by(normalize(q, get("self_attn.q_norm")), position)
                scores = torch.stack([query @ key for key in keys]) / HEAD_SIZE**0.5
                attended.append(scores.softmax(0) @ values)
            x = x + get("self_attn.o_proj") @ torch.cat(attended)
            normed = normalize(x, get("post_attention_layernorm"))
            gate = get("mlp.gate_proj") @ normed
            gated = gate / (1 + torch.exp(-gate)) * (get("mlp.up_proj") @ normed)
            outputs.append(x + get("mlp.down_proj") @ gated)
        block = outputs
    return [normalize(x, weights["norm.weight"]) for x in block[not is_spark :]]


def guess_medusa(weights: dict[str, Tensor], features: Features, row: int, place: int) -> Any:
    logits = []
    for head in range(STEPS):
        x, layer = features.hidden[row, place], 0
        while f"{head}.{layer}.linear.weight" in weights:
            y = (
                weights[f"{head}.{layer}.linear.weight"] @ x
                + weights[f"{head}.{layer}.linear.bias"]
            )
            x = x + y / (1 + torch.exp(-y))
            layer += 1
        logits.append(weights[f"{head}.{layer}.weight"] @ x)
    return logits


def guess_redrafter(
    weights: dict[str, Tensor], features: Features, row: int, place: int
) -> list[Tensor]:
    logits, state = [], torch.zeros(HIDDEN)
    for e in features.embedded[row, place + 1 : place + 1 + STEPS]:
        if "rnn_u.weight" in weights:
            u = weights["rnn_u.weight"] @ state + weights["rnn_u.bias"]
            state = weights["rnn_w.weight"] @ e + u
            state = state / (1 + torch.exp(-state))
        else:
            state = state + e
        x, layer = torch.cat([features.hidden[row, place], state]), 0
        if "input_proj.weight" in weights:
            x = weights["input_proj.weight"] @ x + weights["input_proj.bias"]
        while f"lm_head.{layer}.linear.weight" in weights:
            name = f"lm_head.{layer}.linear"
            y = weights[f"{name}.weight"] @ x + weights[f"{name}.bias"]
            x = x + y / (1 + torch.exp(-y))
            layer += 1
        logits.append(weights[f"lm_head.{layer}.weight"] @ x)
    return logits


Seen = dict[tuple[int, int, int], tuple[int, Tensor]]  # (step, row, place) -> label, logits


def compute_reference(
    kind: str, drafter: TrainableDrafter, features: Features, mask: Tensor
) -> tuple[Tensor, Seen]:
    """The loss, and the logits of every label."""
    seen: Seen = {}
    weights = dict(drafter.named_parameters())
    head = features.head.weight
    is_normed = NORMS.get(kind, {}).get("norm_output", False)
    terms: list[list[Tensor]] = [[] for _ in range(STEPS)]
    for row in range(len(mask)):
        for place in range(mask.shape[1] - 2):
            if kind in REDRAFTERS:
                guesses = guess_redrafter(weights, features, row, place)
            elif kind.startswith("medusa"):
                guesses = guess_medusa(weights, features, row, place)
            elif kind in ("dflash", "dspark"):
                guesses = draft_dflash(weights, features, row, place)
            else:
                guesses = draft_eagle(weights, features, row, place, norms_output=is_normed)
            for step, guess in enumerate(guesses):
                at = place + 2 + step
                if at >= mask.shape[1] or not mask[row, at]:
                    continue
                if kind in NORMS:
                    normed = guess if is_normed else normalize(guess, weights["norm.weight"])
                    logits = weights["lm_head.weight"] @ normed
                else:
                    is_whole = kind.startswith(("medusa", "redrafter"))
                    logits = guess if is_whole else head @ guess
                if kind == "dspark":
                    before = weights["markov_head.markov_w1.weight"][features.tokens[row, at - 1]]
                    logits = logits + weights["markov_head.markov_w2.weight"] @ before
                seen[step, row, place] = int(features.tokens[row, at]), logits.detach()
                logs = logits - logits.exp().sum().log()
                share = 1.0 if kind in NORMS else {"medusa-soft": 0.4}.get(kind, 0.6)
                share = 0.0 if kind in ("medusa", "medusa-2", *REDRAFTERS) else share
                wanted = (head @ features.hidden[row, at - 1]).softmax(0)
                soft = (wanted * (wanted.log() - logs)).sum()
                loss = (1 - share) * -logs[features.tokens[row, at]] + share * soft
                if kind in ("eagle", "eagle-2-layers"):
                    missed = (guess - features.hidden[row, at - 1]).abs()
                    smooth = torch.where(missed < 1, missed.square() / 2, missed - 0.5).mean()
                    loss = 0.3 * loss + smooth
                terms[step].append(loss)
    decay = 0.8 if kind.startswith(("medusa", "dflash", "dspark")) else 0.9
    decay = REDRAFTERS[kind].get("redrafter_loss_decay", 1.0) if kind in REDRAFTERS else decay
    total = torch.stack([decay**i * torch.stack(t).mean() for i, t in enumerate(terms)]).sum()
    return total, seen


@pytest.mark.thorough
@pytest.mark.parametrize("kind", DRAFTERS)
def test_loss_and_gradients_match_the_formulas(kind: str) -> None:
    drafter = make_drafter(kind)
    features, mask = make_batch()
    expected, seen = compute_reference(kind, drafter, features, mask)
    torch.autograd.backward(expected)
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    num_labels = drafter.count_labels(mask)
    assert num_labels.tolist() == [sum(at == step for at, *_ in seen) for step in range(STEPS)]
    loss, _ = drafter(features, mask, num_labels.float(), False)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    loss.backward()
    for name, parameter in drafter.named_parameters():
        assert gradients[name].any(), name
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", DRAFTERS)
@pytest.mark.parametrize("length", [3, 8])
def test_a_batch_without_labels_has_zero_loss(kind: str, length: int) -> None:
    drafter = make_drafter(kind)
    features, mask = make_batch(length=length)
    nothing = torch.zeros_like(mask)
    loss, packed = drafter(features, nothing, drafter.count_labels(nothing).float(), True)
    loss.backward()
    assert loss.item() == 0
    assert torch.isfinite(packed).all()
    assert all(p.grad is None or not p.grad.any() for p in drafter.parameters())


@pytest.mark.parametrize("kind", DRAFTERS)
def test_padding_and_cutting_change_nothing(kind: str) -> None:
    """Rows that are padded at their ends, and batches cut up, have the loss of the whole."""
    drafter = make_drafter(kind)
    features, mask = make_batch(num_rows=2)
    mask[1, 5:] = False  # the second row ends there
    num_labels = drafter.count_labels(mask).float()
    whole, _ = drafter(features, mask, num_labels, False)
    parts = []
    for row, length in ((0, 8), (1, 5)):
        cut = {
            name: getattr(features, name)[row : row + 1, :length]
            for name in ("tokens", "hidden", "embedded", "auxiliary")
        }
        part = Features(**cut, head=features.head)
        parts.append(drafter(part, mask[row : row + 1, :length], num_labels, False)[0])
    torch.testing.assert_close(parts[0] + parts[1], whole)


def test_medusa_begins_by_saying_what_the_target_says() -> None:
    heads = Medusa(TrainSettings(medusa_num_heads=2, medusa_num_layers=2), make_head())
    x = torch.randn(5, HIDDEN)
    for head in range(2):
        logits = heads.use_head(make_batch()[0], head, x, lambda layer: layer.x @ layer.weight.T)
        torch.testing.assert_close(logits, x @ make_head().weight.T)


def test_dflash_draws_other_anchors_in_every_step() -> None:
    """In training by chance; in an evaluation always the same ones. All count for all places."""
    drafter = make_drafter("dflash")
    assert isinstance(drafter, DFlash)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[1, 40:] = False
    drawn = [drafter.choose_anchors(mask) for _ in range(2)]
    assert (drawn[0].context_ends != drawn[1].context_ends).any()
    drafter.eval()
    first, again = (drafter.choose_anchors(mask) for _ in range(2))
    assert (first.context_ends == again.context_ends).all()
    gaps = first.context_ends[0].sort().values.diff()
    assert gaps.min() > 298 // 9 // 2, "evenly spread"
    for anchors in (*drawn, first):
        assert anchors.is_real.all()
        assert anchors.context_ends[1].max() < 38, "a label follows each"
        torch.testing.assert_close(anchors.shares, torch.tensor([[298 / 9], [38 / 9]]))
    few = drafter.choose_anchors(mask[:, :6])
    assert (few.is_real.sum(1) == 4).all()
    assert (few.shares == 1).all()


def test_the_mask_token_has_an_embedding() -> None:
    """A row of zeros, as padding has in many targets, would make queries of zero."""
    config: Any = SimpleNamespace(pad_token_id=1, eos_token_id=[1, 3])
    table = torch.ones(5, HIDDEN)
    assert choose_mask_token("--some-flag", None, config, table) == 1
    assert choose_mask_token("--some-flag", 4, config, table) == 4
    table[1] = 0
    assert choose_mask_token("--some-flag", None, config, table) == 3
    table[3] = 0
    assert choose_mask_token("--some-flag", None, SimpleNamespace(), table) == 0
    for requested_token in (1, 5):
        with pytest.raises(SpecDecError, match=f"--some-flag is {requested_token}: of the targ"):
            choose_mask_token("--some-flag", requested_token, config, table)


def test_eagle_noise_is_drawn_in_training_only() -> None:
    drafter = make_drafter("eagle")
    noisy = Eagle1(make_recipe(self_distillation=0.6, eagle_noise=0.5), MODEL)
    noisy.load_state_dict(drafter.state_dict())
    features, mask = make_batch()
    counts = drafter.count_labels(mask).float()
    plain = drafter(features, mask, counts, False)[0]
    torch.manual_seed(1)
    first = noisy(features, mask, counts, False)[0]
    second = noisy(features, mask, counts, False)[0]
    torch.manual_seed(1)
    torch.testing.assert_close(noisy(features, mask, counts, False)[0], first)
    assert first != second
    assert first != plain
    noisy.eval()
    torch.testing.assert_close(noisy(features, mask, counts, False)[0], plain)


def test_the_mask_of_a_later_step() -> None:
    drawn = ["".join("x" if seen else "." for seen in line) for line in make_mask([4, 3, 2],
        torch.device("cpu"))[0, 0].tolist()]  # fmt: skip
    assert drawn == ["x...x..x.", "xx...x..x"]


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk_elements", [VOCAB, 1 << 20])
@pytest.mark.parametrize("is_head_trained", [True, False])
def test_soft_labels_match_the_formula(
    share: float, chunk_elements: int, is_head_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(features_module.CHUNK_ELEMENTS, "cpu", chunk_elements)
    torch.manual_seed(0)
    x = torch.randn(7, 5, requires_grad=True)
    weight = torch.randn(VOCAB, 5, requires_grad=is_head_trained)
    labels, weights = torch.randint(0, VOCAB, (7,)), torch.rand(7)
    bias = torch.randn(VOCAB)
    head = OutputHead(torch.randn(VOCAB, 4), bias, scale=0.5, cap=2.0)
    teacher = Teacher(torch.randn(7, 4), head, share)
    loss, losses, ranks = compute_loss(
        x, weight, labels, weights, measure=True, teacher=teacher if share else None
    )
    loss.backward()
    assert x.grad is not None
    found = x.grad.clone(), weight.grad
    x.grad = weight.grad = None
    logs = (x @ weight.T).log_softmax(-1)
    raw = (teacher.hidden @ head.weight.T + bias) * 0.5
    wanted = torch.tanh(raw / 2).mul(2).log_softmax(-1)
    hard = -logs.gather(1, labels[:, None])[:, 0]
    expected = (1 - share) * hard + share * (wanted.exp() * (wanted - logs)).sum(1)
    torch.autograd.backward((expected * weights).sum())
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[0], x.grad, rtol=1e-4, atol=1e-5)
    if is_head_trained:
        torch.testing.assert_close(found[1], weight.grad, rtol=1e-4, atol=1e-5)
    else:
        assert found[1] is None
    guessed = wanted.argmax(1) if share == 1 else labels
    order = logs.argsort(1, descending=True)
    assert ranks.tolist() == [
        (o == g).nonzero().item() for o, g in zip(order, guessed, strict=True)
    ]


def test_a_reduced_vocabulary_learns_the_targets_choice_among_its_tokens() -> None:
    """The divergence from the target's distribution over these tokens, whatever the text says."""
    kept = torch.tensor([1, 4, 5, 9])
    params = Eagle3Params(
        aux_layers=tuple(range(NUM_AUXILIARY)), draft_vocab_size=len(kept),
        norm_before_residual=False,
    )  # fmt: skip
    drafter = Eagle3(make_recipe(self_distillation=1.0), MODEL, make_head(), params, kept)
    assert torch.equal(drafter.lm_head.weight, make_head().weight[kept])
    assert drafter.d2t is not None
    assert (drafter.d2t + torch.arange(4)).tolist() == kept.tolist()
    features, mask = make_batch()
    num_labels = drafter.count_labels(mask)
    loss, _ = drafter(features, mask, num_labels, True)
    expected = torch.zeros(())
    for step, states in enumerate(drafter.draft_states(features)):
        own = (drafter.norm(states) @ drafter.lm_head.weight.T).log_softmax(-1)
        # Of the token at place t + 2 + step the target decides at the place before.
        hidden = features.hidden[:, 1 + step : 1 + step + states.shape[1]]
        wanted = (hidden @ make_head().weight[kept].T).log_softmax(-1)
        divergence = (wanted.exp() * (wanted - own)).sum(-1)[mask[:, 2 + step :]]
        expected = expected + 0.9**step * divergence.sum() / num_labels[step]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("loss", ["kl", "tv"])
def test_measures_of_a_reduced_vocabulary_run_the_targets_layer_once(
    loss: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all depths, and for the loss where that reads it too; misses are counted by its rows."""
    kept = torch.tensor([1, 4, 5, 9])
    params = Eagle3Params(
        aux_layers=tuple(range(NUM_AUXILIARY)), draft_vocab_size=len(kept),
        norm_before_residual=False,
    )  # fmt: skip
    recipe = make_recipe(self_distillation=1.0, loss=loss)
    drafter = Eagle3(recipe, MODEL, make_head(), params, kept)
    features, mask = make_batch()
    sizes: list[int] = []
    compute_logits = OutputHead.compute_logits

    def count_logits(head: OutputHead, hidden: Tensor) -> Tensor:
        sizes.append(len(head.weight))
        return compute_logits(head, hidden)

    monkeypatch.setattr(OutputHead, "compute_logits", count_logits)
    _, packed = drafter(features, mask, drafter.count_labels(mask), True)
    assert sizes.count(VOCAB) == 1
    hits = Measures.unpack(packed, STEPS).hits[:, -1]
    for step in range(STEPS):
        hidden = features.hidden[:, 1 + step : -1][mask[:, 2 + step :]]
        choices = compute_logits(make_head(), hidden).argmax(1)
        assert hits[step] <= torch.isin(choices, kept).sum()


def test_measures_match_counting_by_hand() -> None:
    drafter = make_drafter("redrafter")
    features, mask = make_batch(num_rows=6, length=12)
    # Train a little, so that there are hits to count.
    optimizer = torch.optim.Adam(drafter.parameters(), lr=0.02)
    for _ in range(30):
        drafter(features, mask, drafter.count_labels(mask).float(), False)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    _, seen = compute_reference("redrafter", drafter, features, mask)
    _, packed = drafter(features, mask, drafter.count_labels(mask).float(), True)
    summary = Measures.unpack(packed, STEPS).summarize()
    for step in range(STEPS):
        own = [found for (at, *_), found in seen.items() if at == step]
        for k in range(1, 6):
            hits = [label in logits.topk(k).indices.tolist() for label, logits in own]
            assert summary["top_k_accuracy"][step][k - 1] == round(sum(hits) / len(hits), 4)
        losses = [float(logits.logsumexp(0) - logits[label]) for label, logits in own]
        assert abs(summary["loss_per_position"][step] - sum(losses) / len(losses)) < 1e-3
    right = {place: int(logits.argmax()) == label for place, (label, logits) in seen.items()}
    lengths = []
    for row, place in {(row, place) for _, row, place in right}:
        chain = [right.get((step, row, place)) for step in range(STEPS)]
        if None not in chain:
            lengths.append([*chain, False].index(False))
    assert 0 < sum(lengths) < STEPS * len(lengths)
    assert summary["chain_length"] == round(1 + sum(lengths) / len(lengths), 4)


def test_equal_logits_rank_by_id() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0]])
    ranks = [int(rank_labels(logits, logits[:, i : i + 1], torch.tensor([[i]]))) for i in range(5)]
    assert ranks == [3, 0, 1, 2, 4]


def test_bfloat16_inputs_give_float32_gradients_of_the_weight() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(7, 4, requires_grad=True)
    labels, weights = torch.tensor([0, 6, 3, 3, 1]), torch.rand(5)
    loss, losses, _ = compute_loss(x, weight, labels, weights, measure=False)
    exact = torch.nn.functional.cross_entropy(
        x.float() @ weight.detach().T, labels, reduction="none"
    )
    torch.testing.assert_close(losses, exact, rtol=0.03, atol=0.03)
    loss.backward()
    assert weight.grad is not None
    assert x.grad is not None
    assert weight.grad.dtype == torch.float32
    assert x.grad.dtype == torch.bfloat16
    assert weight.grad.any()


def test_measures_survive_packing() -> None:
    masks = [torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 3, dtype=torch.bool)]
    ranks = torch.tensor([0, 0, 1, 4, 0, 2, 0])
    measures = measure_positions(torch.arange(7.0), ranks, masks, 2)
    again = Measures.unpack(measures.pack(), 2)
    assert again.loss.tolist() == [6.0, 15.0]
    assert again.num_labels.tolist() == [4.0, 3.0]
    assert again.hits.tolist() == [[2.0, 3.0], [2.0, 2.0]]
    # Three places have both labels: right+right, right+wrong, wrong.
    assert (float(again.chain), float(again.num_chains)) == (3.0, 3.0)
