"""The loss in chunks against torch's own, and the model that computes it in its head."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
import torch
import torch.nn.functional as F
from llama_support.config import Config
from llama_support.errors import BadInput
from llama_support.loss import LlamaWithLoss, LossHead, liger_cross_entropy, summed_cross_entropy, uses_liger
from llama_support.packing import IGNORED
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 50


def _inputs(positions: int, dtype: torch.dtype, ignored: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(positions)
    hidden = torch.randn(positions, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, 16, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (positions,), generator=generator)
    labels[torch.rand(positions, generator=generator) < ignored] = IGNORED
    return hidden, weight, labels


def _loss_and_gradients(function: object, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    loss = function(hidden, weight, labels)  # type: ignore[operator]
    return (loss.detach(), *torch.autograd.grad(0.25 * loss, [hidden, weight]))


def _whole(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, labels, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize("logits_bytes", [1, 4 * VOCABULARY, 4 * VOCABULARY * 7, 2**20])
@pytest.mark.parametrize("positions", [1, 7, 20])
def test_loss_and_gradients_are_those_of_all_logits_at_once(positions: int, logits_bytes: int) -> None:
    inputs = _inputs(positions, torch.float64)
    actual = _loss_and_gradients(lambda *args: summed_cross_entropy(*args, logits_bytes=logits_bytes), *inputs)
    for one, other in zip(actual, _loss_and_gradients(_whole, *inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_bf16_is_summed_in_fp32() -> None:
    hidden, weight, labels = _inputs(400, torch.bfloat16)
    actual = _loss_and_gradients(lambda *args: summed_cross_entropy(*args, logits_bytes=64 * VOCABULARY), *(
        hidden, weight, labels,
    ))  # fmt: skip
    exact = _loss_and_gradients(_whole, hidden.double(), weight.double(), labels)
    assert actual[0].dtype == torch.float32
    # Logits of size about 10 are rounded to bf16, by up to 2^-9 of each, independently in 280 terms.
    torch.testing.assert_close(actual[0].double(), exact[0], rtol=2**-8, atol=0)
    for one, other in zip(actual[1:], exact[1:], strict=True):
        assert one.dtype == torch.bfloat16
        # Softmax's relative error is the logit's absolute one, at most 2^-9 * 32; the sums over 25 chunks add 25 * 2^-9
        # of a partial sum.
        assert float((one.double() - other).norm() / other.norm()) < 0.05


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_large_logits_do_not_overflow(scale: float) -> None:
    hidden, weight, labels = _inputs(9, torch.float32)
    inputs = ((hidden * scale).detach().requires_grad_(), weight, labels)
    actual = _loss_and_gradients(summed_cross_entropy, *inputs)
    for one, other in zip(actual, _loss_and_gradients(_whole, *inputs), strict=True):
        assert bool(torch.isfinite(one).all())
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_without_labels_there_is_nothing_to_learn() -> None:
    hidden, weight, labels = _inputs(5, torch.float32, ignored=2.0)
    loss, *gradients = _loss_and_gradients(summed_cross_entropy, hidden, weight, labels)
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients)


def test_a_gradient_that_is_not_finite_shows_in_the_loss() -> None:
    hidden, weight, labels = _inputs(5, torch.float32)
    with torch.no_grad():
        hidden[2, 3] = float("nan")
    labels[2] = 1
    assert torch.isnan(summed_cross_entropy(hidden, weight, labels))


def test_frozen_weights_and_evaluation_make_no_gradient() -> None:
    hidden, weight, labels = _inputs(5, torch.float32)
    loss = summed_cross_entropy(hidden, weight.detach(), labels)
    loss.backward()
    assert hidden.grad is not None
    with torch.no_grad():
        assert not summed_cross_entropy(hidden, weight, labels).requires_grad


def test_a_second_backward_pass_is_refused() -> None:
    loss = summed_cross_entropy(*_inputs(5, torch.float32))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("tied", [True, False])
def test_model_with_loss_is_the_model(tied: bool) -> None:
    """The same names, weights (also drawn at random) and logits as transformers' class, and its loss."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=tied, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(1)
    plain = LlamaForCausalLM(config)
    torch.manual_seed(1)
    model = LlamaWithLoss(config)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    theirs = plain.state_dict()
    assert list(model.state_dict()) == list(theirs)
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    tokens = torch.arange(24).reshape(2, 12) % VOCABULARY
    labels = tokens.roll(-1, 1)
    labels[:, -1] = IGNORED
    logits = plain(input_ids=tokens).logits
    assert torch.equal(model(input_ids=tokens).logits, logits)
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    torch.testing.assert_close(model(input_ids=tokens, loss_labels=labels), expected)


CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def _install(monkeypatch: pytest.MonkeyPatch, works: bool | Exception) -> None:
    """Have liger-kernel installed, or not, or such that its import raises."""
    names = ["liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional"]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    if works is True:
        for name in names:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        return

    class Finder:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "liger_kernel":
                raise works if isinstance(works, Exception) else ModuleNotFoundError("No module named 'liger_kernel'")

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


@pytest.mark.parametrize(
    "choice, device, works, expected",
    [
        ("auto", CUDA, True, True),
        ("auto", CUDA, False, False),
        ("auto", CUDA, AttributeError("module 'triton' has no attribute 'x'"), False),
        ("auto", CPU, True, False),
        ("chunked", CUDA, True, False),
        ("chunked", CPU, False, False),
        ("liger", CUDA, True, True),
        ("liger", CUDA, False, r"ModuleNotFoundError: No module.* pip install liger-kernel, or give --loss chunked"),
        ("liger", CUDA, AttributeError("odd"), r"cannot be imported \(AttributeError: odd\)"),
        ("liger", CPU, True, r"runs on GPUs, and this run is on cpu; give --loss chunked"),
    ],
)
def test_what_the_choice_of_the_loss_means(
    monkeypatch: pytest.MonkeyPatch, choice: str, device: torch.device, works: bool | Exception, expected: bool | str
) -> None:
    _install(monkeypatch, works)
    if isinstance(expected, str):
        with pytest.raises(BadInput, match=f"--loss liger.*{expected}"):
            uses_liger(choice, device)
    else:
        assert uses_liger(choice, device) is expected
    assert Config().loss == "auto"


def test_the_head_takes_the_loss_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, labels = _inputs(5, torch.float32)
    head = LossHead(16, VOCABULARY, bias=False)
    head.weight = torch.nn.Parameter(weight.detach())
    called = []
    kernel = ModuleType("liger_kernel.transformers.functional")

    def fused(*args: object, **options: object) -> Tensor:
        called.append(options)
        return torch.ones((), dtype=torch.bfloat16)

    kernel.liger_fused_linear_cross_entropy = fused  # type: ignore[attr-defined]
    _install(monkeypatch, True)
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    assert torch.equal(head(hidden, labels), summed_cross_entropy(hidden, weight, labels))
    assert called == []
    head.use_liger = True
    assert head(hidden, labels).dtype == torch.float32
    assert called == [{"ignore_index": IGNORED, "reduction": "sum"}]
    head(hidden.detach(), labels).backward()  # layers that are frozen, of which Liger makes no gradient of the head
    assert head.weight.grad is not None
    with torch.no_grad():
        head(hidden, labels)
    assert len(called) == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("ignored", [0.3, 2.0], ids=["some", "all ignored"])
def test_liger_gives_loss_and_gradients_of_the_chunks(device: str, ignored: float) -> None:
    """On a CPU its kernel runs in Triton's interpreter.

    Both round logits, softmax and, chunk by chunk, the weight's gradient to bf16 (u = 2^-9 each time): logits of
    standard deviation 1, so mostly below 4, are off by 4 u, and the softmax relatively by as much and its own u; sums
    over 4 chunks add 4 u and the result's u. In the norms of whole gradients that is 10 u; twice that between the two.
    """
    try:
        importlib.import_module("liger_kernel.transformers.functional")
    except ImportError as error:
        pytest.skip(f"liger-kernel is not installed ({error}): pip install 'flashoptim-dist[liger]'")
    positions, width, vocabulary = 256, 64, 251
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(positions, width, generator=generator).to(device, torch.bfloat16).requires_grad_()
    weight = (torch.randn(vocabulary, width, generator=generator) / 8.0).to(device, torch.bfloat16).requires_grad_()
    labels = torch.randint(0, vocabulary, (positions,), generator=generator)
    labels[torch.rand(positions, generator=generator) < ignored] = IGNORED
    labels = labels.to(device)
    theirs = _loss_and_gradients(liger_cross_entropy, hidden, weight, labels)
    chunk_bytes = 4 * vocabulary * positions // 4
    chunks = _loss_and_gradients(
        lambda *inputs: summed_cross_entropy(*inputs, logits_bytes=chunk_bytes), hidden, weight, labels
    )
    exact = _loss_and_gradients(_whole, hidden.double(), weight.double(), labels)
    assert theirs[0].dtype == chunks[0].dtype == torch.float32
    # Errors of single logits, 4 u, are independent in 180 terms of 5.5 and more.
    torch.testing.assert_close(theirs[0], chunks[0], rtol=2**-9, atol=0.0)
    for one, other, true in zip(theirs[1:], chunks[1:], exact[1:], strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        scale = float(true.norm())
        assert float((one.double() - true).norm()) <= 10 * 2**-9 * scale
        assert float((one.double() - other.double()).norm()) <= 20 * 2**-9 * scale
        assert scale > 0.0 or ignored > 1.0
