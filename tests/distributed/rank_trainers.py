"""TRL's unmodified trainers on each rank, as `torchrun` and `accelerate launch` would run them."""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig, state
from accelerate.utils import DistributedType
from adapter_cases import NF4, loaded, with_lora
from grpo_cases import grpo as grpo_on_rollouts
from own_losses import with_own_loss
from preferences import pairs, settings, word_tokenizer
from rank_work import device
from safetensors.torch import load_file
from sft_cases import rows, tokenizer
from tiny import VOCAB, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from trainer_cases import BUILD, Gradients, grpo, ids_of, plain, texts, watch_batches
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

import fastpack
from fastpack.trainers.metrics import attach

EXAMPLES = 8
"""The batch size of a step, on all ranks."""
STEPS = 3
DDP: dict[str, Any] = {"ddp_find_unused_parameters": False, "dataloader_pin_memory": False}
FSDP2: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
}


def trainer_of(
    kind: str,
    lora: bool,
    ranks: int,
    patched: bool,
    loss: Any = None,
    model_type: str = "llama",
    in_4bit: Path | None = None,
    streams: bool = False,
    **further: Any,
) -> Any:
    """Build an SFT or DPO trainer, patched as a user would; the reference is patched before the trainer shards it.

    Args:
        in_4bit: a folder with a model that bitsandbytes quantises.
        streams: whether SFT's rows are streamed.
    """
    if in_4bit is None:
        model: Any = tiny_model(model_type, attn_implementation="sdpa")
    else:
        place = str(device()) if dist.is_initialized() else "cuda" if torch.cuda.is_available() else "cpu"
        model = loaded(in_4bit, device=place, **NF4, bnb_4bit_compute_dtype=torch.float32)
    # made before the arguments, since transformers' ZeRO-3 would partition it at once, with other weights
    reference: Any = None if lora or kind == "sft" else tiny_model("llama", attn_implementation="sdpa")
    if lora:
        model = with_lora(model)
    inputs = settings(Path(tempfile.mkdtemp()), per_device_train_batch_size=EXAMPLES // ranks, learning_rate=1e-2)
    inputs |= {"max_steps": STEPS, **DDP, **further}
    arguments = (SFTConfig if kind == "sft" else DPOConfig)(**inputs)
    if ranks == 1 and arguments.n_gpu > 1:
        arguments._n_gpu = 1  # else one process takes all GPUs for itself, with nn.DataParallel
    if kind == "sft":
        data: Any = rows(EXAMPLES * STEPS)
        data = data.to_iterable_dataset() if streams else data
        trainer: Any = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer())
    else:
        if reference is not None and patched:
            spread = "parallelism_config" in further
            mesh = init_device_mesh(device().type, (ranks,), mesh_dim_names=("cp",)) if spread else None
            fastpack.patch(reference, loss=loss, context_mesh=mesh)
        trainer = DPOTrainer(
            model,
            reference,
            args=arguments,
            train_dataset=pairs(EXAMPLES * STEPS),
            processing_class=word_tokenizer(),
        )
    return fastpack.patch(trainer, loss=loss) if patched else trainer


def train(trainer: Any) -> list[tuple[float, float]]:
    """Return the loss and the gradient's norm at each step."""
    trainer.train()
    return [(entry["loss"], float(entry["grad_norm"])) for entry in trainer.state.log_history if "loss" in entry]


def train_on_ranks(
    kind: str, lora: bool, *, evaluated: bool = False, keep: int | None = None, **further: Any
) -> dict[str, Any]:
    """Return this rank's logs, and the trainer's report afterwards."""
    if "deepspeed" in further:
        from deepspeed import ops

        ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo's exchanges, which need no C++ compiler
    with as_launched():
        trainer = trainer_of(kind, lora, dist.get_world_size(), True, **further)
        if keep is not None:
            fastpack.shard_base(trainer, keep=keep)
        result: dict[str, Any] = {"logged": train(trainer), "wrapped": type(trainer.model_wrapped).__name__}
        if evaluated:
            result["eval"] = trainer.evaluate(trainer.train_dataset)["eval_loss"]
        spread = [parameter for parameter in trainer.model.parameters() if hasattr(parameter, "device_mesh")]
        result["sharded"] = [sum(p.to_local().numel() for p in spread), sum(p.numel() for p in spread)]
        result["trained"] = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
        if keep is not None:
            trainer.save_model(folder := tempfile.mkdtemp())
            files = [load_file(path) for path in Path(folder).glob("adapter_model.safetensors")]
            result["saved"] = [sum(tensor.numel() for tensor in each.values()) for each in files]
        report = fastpack.report(trainer)
        result["metrics"] = [
            [entry.get(name, 0.0) for name in ("entropy", "mean_token_accuracy", "num_tokens", "aux_loss")]
            for entry in trainer.state.log_history
            if "loss" in entry and kind == "sft"
        ]
        result["of loss"] = [
            *(note for note in report.notes if note.startswith("loss")),
            *dict(report.skipped).values(),
        ]
        result["notes"] = report.notes
        result |= {"tier": report.tier, "as_modules": report.as_modules, "world": trainer.args.world_size}
        fastpack.unpatch(trainer)
        result["tier after"] = fastpack.report(trainer).tier
    return result


def one_step_within(
    kind: str, max_tokens: int | fastpack.TokenBudget, own: str | None = None, **further: Any
) -> dict[str, Any]:
    """Run an optimiser step with a budget; return the examples of each rank's micro-batches, and the gradients.

    Args:
        own: which of :data:`own_losses.OWN` the trainer has.
    """
    with as_launched():
        launched = {**DDP, "max_steps": 1}
        build = BUILD[kind] if own is None else functools.partial(with_own_loss, BUILD[kind], own)
        trainer = build(Path(tempfile.mkdtemp()), **{**launched, **further})
        batches = watch_batches(trainer)
        examples = [ids_of(example) for example in trainer.train_dataset]
        fastpack.patch(trainer, max_tokens=max_tokens)
        gradients = Gradients(trainer)
        trainer.train()
        steps = trainer.args.gradient_accumulation_steps
        chosen = [[examples.index(example) for example in batch] for batch in batches[:steps]]
        logged = {name: value for name, value in trainer.state.log_history[0].items() if isinstance(value, float)}
        note = next(note for note in fastpack.report(trainer).notes if note.startswith("max_tokens"))
    return {"chosen": chosen, "gradients": gradients.steps[0], "logged": logged, "note": note}


def generated_within(max_tokens: int | None) -> dict[str, Any]:
    """Return GRPO's gradients on this rank's own prompts, and the number of pieces that its batches ran in."""
    with as_launched():
        launched = {**DDP, "max_steps": 1}
        trainer = fastpack.patch(grpo(Path(tempfile.mkdtemp()), loss_type="grpo", **launched), max_tokens=max_tokens)
        gradients = Gradients(trainer)
        trainer.train()
        note = "".join(note for note in fastpack.report(trainer).notes if note.startswith("max_tokens"))
    return {"gradients": gradients.steps[0], "note": note}


def part_of_a_run(
    folder: str, lora: bool, *, alone: bool = False, stop: int | None = None, resumed: int | None = None, **further: Any
) -> dict[str, Any]:
    """Train SFT up to step ``stop``, with checkpoints in ``folder``, or from one; return logs and rows of each step.

    ``alone``: in one process, as if there were no ranks.
    """
    ranks = 1 if alone else dist.get_world_size()
    keep = further.pop("keep", None)
    with as_launched(alone=alone):
        saving = {"output_dir": folder, "save_strategy": "steps" if resumed is None else "no", "save_steps": 1}
        trainer = trainer_of("sft", lora, ranks, True, **saving, **further)
        if keep is not None:
            fastpack.shard_base(trainer, keep=keep)
        rows: list[list[tuple[int, ...]]] = []
        step = trainer.compute_loss

        def watched(model: Any, inputs: Any, **kwargs: Any) -> Any:
            masks = inputs["attention_mask"].bool()
            rows.append([tuple(ids[mask].tolist()) for ids, mask in zip(inputs["input_ids"], masks, strict=True)])
            return step(model, inputs, **kwargs)

        trainer.compute_loss = watched
        trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=None if resumed is None else f"{folder}/checkpoint-{resumed}")
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        logged = [(entry["loss"], float(entry["grad_norm"])) for entry in entries]
    return {"logged": logged, "rows": rows}


class StopAt(TrainerCallback):
    """A callback that ends a run behind a step, and its checkpoint."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def plain_trainer(*, spread: bool, average: bool, loss: str | None = None) -> dict[str, Any]:
    """Return logs, the evaluation's loss of nine rows and the counts of tokens of transformers' own trainer.

    Its model has experts, whose auxiliary loss is as large as the loss; alone, it is the stock model in one process.
    """
    inputs: dict[str, Any] = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 8, "max_steps": 2}
    # weights stay, so that the evaluation is of the same ones
    inputs |= {"average_tokens_across_devices": average, "gradient_accumulation_steps": 2, "learning_rate": 0.0}
    if spread:
        layers = {**FSDP2["fsdp_config"], "transformer_layer_cls_to_wrap": ["MixtralDecoderLayer"]}
        inputs |= {"fsdp": True, "fsdp_config": layers, "parallelism_config": ParallelismConfig(cp_size=2)}
    with as_launched(alone=not spread):
        trainer = plain(Path(tempfile.mkdtemp()), texts(33), **inputs)
        trainer.model = trainer.model_wrapped = tiny_model(
            "mixtral", attn_implementation="sdpa", output_router_logits=True, router_aux_loss_coef=1.0
        )
        if spread:
            fastpack.patch(trainer, loss=loss)
        metrics = attach(trainer)
        logged = train(trainer)
        rows = trainer.train_dataset.select(range(9))
        return {"logged": logged, "eval": trainer.evaluate(rows)["eval_loss"], "tokens": metrics.totals["real"]}


def of_4_bits(
    folder: Path,
    *,
    sharded: bool,
    patched: bool = True,
    evaluated: bool = False,
    shares: tuple[int, ...] = (0, 1),
    **settings: Any,
) -> dict[str, Any]:
    """Return the gradients of adapters on a 4-bit model, averaged over ranks, its tier, and the bytes that are sharded.

    Without ``sharded``, the stock model computes them in one process, for the batches of these ranks.

    Args:
        evaluated: whether an evaluation with a cache, which runs bitsandbytes' own layers, comes before.
        **settings: further ones of bitsandbytes.
    """
    place = str(device()) if sharded else "cpu"
    quantised = loaded(folder, device=place, **NF4, bnb_4bit_compute_dtype=torch.float32, **settings)
    packed = sum(p.numel() for p in quantised.parameters() if p.dtype == torch.uint8)
    model: Any = with_lora(quantised)
    outer = model
    if sharded:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        outer, shares = fastpack.shard_base(fastpack.patch(model) if patched else model), (dist.get_rank(),)
    if evaluated:
        with torch.no_grad():
            outer.eval()(input_ids=torch.arange(3, 12)[None].to(place), use_cache=True)
        outer.train()
    for rank in shares:
        ids = torch.randint(3, VOCAB, (3, 20), generator=torch.Generator().manual_seed(rank)).to(place)
        mask = torch.arange(20).to(place) < torch.tensor([[20], [11 - rank], [5]]).to(place)
        labels = ids.masked_fill(~mask, -100)
        loss = outer(input_ids=ids, attention_mask=mask.long(), labels=labels, use_cache=False).loss
        (loss / len(shares)).backward()
    split = [p for p in model.parameters() if p.dtype == torch.uint8 and hasattr(p, "device_mesh")]
    return {
        "gradients": {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None},
        "tier": fastpack.report(model).tier,
        "packed": packed,
        "own": sum(p.to_local().numel() for p in split),
        "sharded": sum(p.numel() for p in split),
    }


def refused_trainer(what: str) -> tuple[str, str]:
    """Return what patching transformers' trainer says with context parallelism, and its model's tier afterwards.

    Args:
        what: ``streamed`` rows, or a ``prepared`` model, for which torch's context parallelism is set up.
    """
    with as_launched():
        spread = {**FSDP2, "parallelism_config": ParallelismConfig(cp_size=2)}
        trainer = plain(Path(tempfile.mkdtemp()), texts(33), max_steps=1, **spread)
        if what == "streamed":
            trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
        else:
            trainer.accelerator.prepare(trainer.model, trainer.create_optimizer())
        try:
            fastpack.patch(trainer)
        except fastpack.PatchError as error:
            return str(error), fastpack.report(trainer).tier
    return "", "patched"


def refused_shards(what: str) -> str:
    """Return what :func:`fastpack.shard_base` says to a model: ``full``, ``experts``, or ``lora`` the second time."""
    model: Any = tiny_model("mixtral" if what == "experts" else "llama")
    model = fastpack.quantize_experts(model) if what == "experts" else model
    model = model if what == "full" else with_lora(model)
    try:
        for _ in range(2):
            fastpack.shard_base(model.to(device()))
    except fastpack.PatchError as error:
        return str(error)
    return ""


class Averaged(TrainerCallback):
    """A callback that averages gradients over all ranks, as a user's own loop would."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for parameter in kwargs["model"].parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def grpo_update(*, spread: bool, fused: bool, **further: Any) -> dict[str, Any]:
    """Return GRPO's losses and gradients in a trainer that knows one process; its model is ``spread`` over the ranks.

    The rollouts are drawn, and the same on each rank.
    """
    with as_launched(alone=True):
        trainer = grpo_on_rollouts(Path(tempfile.mkdtemp()), lora=True, **further)
        if fused:
            fastpack.patch(trainer, loss="fused")
        if spread:
            mesh = init_device_mesh(device().type, (dist.get_world_size(),))
            fastpack.patch(trainer.model, loss="fused" if fused else None, context_mesh=mesh)
            trainer.add_callback(Averaged())
        gradients = Gradients(trainer)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        notes = [note for note in fastpack.report(trainer).notes if note.startswith("context")] if spread else []
        world = trainer.args.world_size
    return {"losses": losses, "gradients": gradients.steps, "notes": notes, "world": world}


@contextmanager
def as_launched(*, alone: bool = False) -> Iterator[None]:
    """Reset accelerate as in a new process, and let it accept FSDP on a CPU as on GPUs; ``alone``: as the only one."""
    stock = state.AcceleratorState.__init__

    def begin(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        stock(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with mock.patch.dict(os.environ), mock.patch.object(state.AcceleratorState, "__init__", begin):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") if alone else ():
            os.environ.pop(name, None)
        state.AcceleratorState._reset_state(reset_partial_state=True)
        try:
            yield
        finally:
            state.AcceleratorState._reset_state(reset_partial_state=True)
