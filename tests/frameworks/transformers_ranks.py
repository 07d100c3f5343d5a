"""What test_transformers.py runs on every rank: `SCENARIO ARGUMENTS FOLDER`; prints JSON."""

import logging
import os
import signal
import sys
import warnings
from pathlib import Path

import torch
from left_over import left_over
from safetensors.torch import load_file
from small_model import digest, end, flat
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import stenograd
import stenograd.transformers


def bert(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64,
            max_position_embeddings=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            **sizes,
        )
    )


def samples(count=160):
    g = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, 64, (count, 8), generator=g)
    return [{"input_ids": row, "labels": int(row[0] > 32)} for row in tokens]


class At(TrainerCallback):
    """Calls something at events of a training, by name."""

    def __init__(self, **events):
        for name, call in events.items():
            setattr(self, name, lambda args, state, control, call=call, **kept: call(state, **kept))


class Bad(Trainer):
    """Makes the loss of rank 1 at step 3 NaN."""

    def compute_loss(self, *args, **options):
        loss = super().compute_loss(*args, **options)
        return loss * float("nan") if (self.state.global_step, self.args.process_index) == (3, 1) else loss


class Without(Trainer):
    """Leaves step 3 out."""

    def training_step(self, *args, **options):
        return torch.zeros(()) if self.state.global_step == 3 else super().training_step(*args, **options)


def trainer_of(folder, steps, kind=Trainer, model=None, callbacks=(), **options):
    defaults = {"save_strategy": "no", "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    defaults["ddp_backend"] = "gloo"
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_steps=10**6,
        **{**defaults, **options},
    )
    return kind(
        model or bert(),
        arguments,
        train_dataset=samples(),
        eval_dataset=samples(16),
        callbacks=list(callbacks),
    )


def trained_by(folder, steps, method=None, resume=None, **options):
    trainer = trainer_of(folder, steps, **options)
    if method is not None:
        attached = stenograd.transformers.use(trainer, method, timeout_s=120)
    trainer.train(resume_from_checkpoint=resume)
    return trainer, attached if method is not None else None


def dense(folder):
    """50 optimizer steps of 4 batches each, by the Trainer's own DDP and by ours."""
    own, _ = trained_by(folder, 50, gradient_accumulation_steps=4)
    ours, attached = trained_by(folder, 50, "dense", gradient_accumulation_steps=4)
    return {
        "difference": (flat(own.model) - flat(ours.model)).abs().max().item(),
        "moved": (flat(own.model) - flat(bert())).abs().max().item(),
        "unused": own.accelerator.ddp_handler.find_unused_parameters,
        "exchanges": attached.sync.step,
        "bytes": attached.traffic.moved_bytes,
        "elements": flat(own.model).numel(),
    }


def frozen(folder):
    """5 steps of the classifier alone."""
    model = bert()
    model.bert.requires_grad_(False)
    _, few = trained_by(folder, 5, "dense", model=model)
    elements = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {"bytes": few.traffic.moved_bytes, "elements": elements}


def trained(method, folder):
    """22 steps; parameters before training ends, and after."""
    own, logged, wrapped = [], [], []
    at = At(
        on_step_end=lambda state, model=None, **_: own.append(digest(model)),
        on_train_end=lambda state, **_: wrapped.append(trainer.model_wrapped is not trainer.model),
        on_log=lambda state, logs=None, **_: logged.append(logs),
    )
    trainer = trainer_of(folder, 22, callbacks=[at])
    stenograd.transformers.use(trainer, method, timeout_s=120)
    trainer.train()
    return {
        "own": own[-1],
        "common": digest(trainer.model),
        "logged": logged[-1]["traffic/moved_bytes"],
        "wrapped": wrapped[-1],
        "elements": flat(trainer.model).numel(),
    }


def stopped(method, folder):
    """13 steps, and 7 of them after a stop where `local` is in mid-round, as it is at the end."""
    place = Path(folder, method.partition(":")[0])

    def keep(state, model=None, **_):
        if state.global_step == 6:
            torch.save(flat(model), f"{place}-rank{torch.distributed.get_rank()}.pt")

    options = {"save_strategy": "steps", "save_steps": 6}
    whole, _ = trained_by(place, 13, method, callbacks=[At(on_save=keep)], **options)
    again, _ = trained_by(place, 13, method, resume=f"{place}/checkpoint-6", model=bert(7))
    return {"whole": digest(whole.model), "resumed": digest(again.model)}


def ask(state, **_):
    if state.global_step == 4 and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)


def asked(method, folder):
    """13 steps, and again with SIGTERM to rank 1 in step 4, which ends training; then to 13 from there."""
    place = Path(folder, f"asked-{method.partition(':')[0]}")
    whole, _ = trained_by(place / "whole", 13, method)

    with stenograd.stop_on():
        _, attached = trained_by(place, 13, method, callbacks=[At(on_step_begin=ask)])
    saved = sorted(path.name for path in place.glob("checkpoint-*"))
    again, _ = trained_by(place, 13, method, resume=f"{place}/{saved[-1]}", model=bert(7))
    digests = {"whole": digest(whole.model), "resumed": digest(again.model)}
    return {**digests, "saved": saved, "stopping": attached.sync.stopping}


def asked_past_the_best(folder):
    """SIGTERM to rank 1 in step 4, where the best is that of step 1 and nothing else is to be kept."""
    place = Path(folder, "past")
    at = At(
        on_step_begin=lambda state, **_: ask(state),
        on_evaluate=lambda state, metrics=None, **_: metrics.update(eval_loss=state.global_step),
    )
    often = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "save_total_limit": 1}
    with stenograd.stop_on():
        trained_by(place, 13, "dense", callbacks=[at], metric_for_best_model="loss", **often)
    return sorted(path.name for path in place.glob("checkpoint-*"))


def asked_while_evaluating(strategy, folder):
    """SIGTERM to rank 1 in step 4, where each step or epoch is evaluated."""
    done = []
    at = At(
        on_step_begin=lambda state, **_: ask(state),
        on_evaluate=lambda state, **_: done.append(["evaluated", state.global_step]),
        on_save=lambda state, **_: done.append(["saved", state.global_step]),
    )
    often = {"eval_strategy": strategy, "eval_steps": 1, "save_strategy": strategy, "save_steps": 100}
    with stenograd.stop_on():
        trained_by(Path(folder, f"while-{strategy}"), 13, "dense", callbacks=[at], **often)
    return done


def resharded_rounds(folder):
    """On other ranks than those that saved: where training starts."""
    starts = []
    at = [At(on_train_begin=lambda state, model=None, **_: starts.append(flat(model)))]
    place = f"{folder}/local/checkpoint-6"
    trained_by(Path(folder, "new"), 9, "local:every=4", resume=place, callbacks=at)
    saved = [torch.load(f"{folder}/local-rank{rank}.pt") for rank in (0, 1)]
    return {
        "mean": (starts[0] - (saved[0] + saved[1]) / 2).abs().max().item(),
        "ranks differed": (saved[0] - saved[1]).abs().max().item(),
    }


def resharded_residuals(folder):
    """On other ranks than those that saved: where training leads."""
    place = f"{folder}/topk/checkpoint-6"
    top, _ = trained_by(Path(folder, "new"), 9, "topk:ratio=0.05", resume=place)
    return digest(top.model)


def bad(folder):
    """One NaN on rank 1 in step 3 of 8, and the same training without that step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        one, attached = trained_by(folder, 8, "topk:ratio=0.05", kind=Bad)
    without, _ = trained_by(folder, 8, "topk:ratio=0.05", kind=Without)
    return {"bad": digest(one.model), "without": digest(without.model), "skipped": attached.sync.skipped}


def best(folder):
    """Rounds with evaluation in mid-round; the first checkpoint, of higher loss, is loaded at the end."""
    often = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    first = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    rounds = []  # what the ranks have in common after the round at step 4, before they part again

    def keep(state, model=None, **_):
        if state.global_step == 4:
            rounds.append({name: t.clone() for name, t in model.state_dict().items()})

    at = [At(on_step_end=keep)]
    trainer, attached = trained_by(Path(folder, "best"), 10, "diloco:every=4", callbacks=at, **often, **first)
    kept = attached.sync.state_dict()["parameters"]
    learning = {name: p for name, p in trainer.model.named_parameters() if p.requires_grad}
    saved = [load_file(f"{folder}/best/checkpoint-{step}/model.safetensors") for step in (5, 10)]
    mine = trainer.model.state_dict()
    return {
        "loaded": [all(torch.equal(mine[name], t) for name, t in tensors.items()) for tensors in saved],
        "exported": all(torch.equal(rounds[0][name], t) for name, t in saved[0].items()),
        "goes on": all(torch.equal(kept[f"{name} in rounds"]["outer"], p) for name, p in learning.items()),
        "digest": digest(trainer.model),
        "losses": [one["eval_loss"] for one in trainer.state.log_history if "eval_loss" in one],
    }


def best_in_an_open_run(folder):
    """A worker of an open run, which comes alone, ends with the first checkpoint's weights in place."""
    os.environ["STENOGRAD_OPEN"] = f"{folder}/open-store"
    often = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    first = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    often["ddp_backend"] = None  # of a single process
    trainer, _ = trained_by(Path(folder, "open"), 8, "diloco:every=2,quorum=0.5", **often, **first)
    saved, mine = load_file(f"{folder}/open/checkpoint-4/model.safetensors"), trainer.model.state_dict()
    return {"loaded": all(torch.equal(mine[name], t) for name, t in saved.items())}


def said(call):
    """Return the class and text of what a call raises, or warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "; ".join(str(one.message) for one in caught if "no state of a method" in str(one.message))


def refused(folder):
    """What must not pass in silence."""
    place, use = Path(folder, "plain"), stenograd.transformers.use
    trained_by(place, 2, save_strategy="steps", save_steps=1)
    late = trainer_of(folder, 2)
    late.add_callback(At(on_train_begin=lambda state, **_: use(late, "topk")))
    done = trainer_of(folder, 1)
    done.train()
    norm, sgd = trainer_of(folder, 2, optim="sgd"), trainer_of(folder, 2, optim="sgd", max_grad_norm=0)
    use(norm, "demo")
    use(sgd, "demo")
    other = trainer_of(folder, 2)
    use(other, "topk")
    other.create_accelerator_and_postprocess()  # as hyperparameter search does
    one_process = trainer_of(folder, 2)
    one_process.args._n_gpu = 2  # as torch's DataParallel has them
    return {
        "several GPUs": said(lambda: (use(one_process, "topk"), one_process.train())),
        "direction": said(norm.train),
        "no clipping": said(sgd.train),
        "late": said(late.train),
        "after": said(lambda: use(done, "topk")),
        "other accelerator": said(other.train),
        "no state": said(lambda: trained_by(folder, 2, "topk", resume=f"{place}/checkpoint-1")),
    }


def again(method, folder):
    """Two trainings of one Trainer, the first of which ends in mid-round; what is left of ours after each."""
    trainer, attached = trained_by(folder, 3, method)
    sent = attached.traffic.moved_bytes
    left = [left_over(trainer.model, trainer.optimizer.optimizer)]
    trainer.train()
    left.append(left_over(trainer.model, trainer.optimizer.optimizer))
    more = attached.traffic.moved_bytes - sent
    found = {"exchanges": attached.sync.step, "syncs": len(attached.syncs), "more": more > 0}
    return found | {"digest": digest(trainer.model), "left": left}


class Referring(Trainer):
    """Prepares a model to refer to when it is made, as trainers of preferences do."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.fixed = self.accelerator.prepare_model(bert(1), evaluation_mode=True)


def referring(folder):
    """3 steps of a trainer that has prepared another model."""
    trainer, attached = trained_by(folder, 3, "topk:ratio=0.05", kind=Referring)
    return {"exchanges": attached.sync.step, "digest": digest(trainer.model)}


def evaluated(method, folder):
    """3 steps after an evaluation; then 3 of a Trainer of its own for the same model."""
    trainer = trainer_of(folder, 3)
    attached = stenograd.transformers.use(trainer, method, timeout_s=120)
    trainer.evaluate()
    trainer.train()
    found = {"exchanges": attached.sync.step, "digest": digest(trainer.model)}
    plain, _ = trained_by(folder, 3, model=trainer.model)
    return found | {"moved": digest(plain.model) != found["digest"], "plain": digest(plain.model)}


def broken(method, folder):
    """What is left of ours where a callback raises on all ranks, after the second step."""
    alive = []

    def fail(state, model=None, optimizer=None, **_):
        if state.global_step == 2:
            alive.extend(left_over(model, optimizer.optimizer))
            raise KeyError("a user's mistake")

    trainer = trainer_of(folder, 4, callbacks=[At(on_step_end=fail)])
    stenograd.transformers.use(trainer, method, timeout_s=120)
    try:
        trainer.train()
    except KeyError:
        trainer.save_model(str(Path(folder, "broken")))
        left = left_over(trainer.model, trainer.optimizer.optimizer)
        return {"alive": alive, "left": left, "loss": trainer.evaluate()["eval_loss"]}


class InOrder(Trainer):
    """Takes samples as they come, so that each step's are known."""

    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def gpt():
    torch.manual_seed(3)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0, **sizes))


class Counting(InOrder):
    """Takes means of its own, which the Trainer does not know of and divides by the passes of a step."""

    def compute_loss(self, model, inputs, *args, **options):
        labels = inputs["wanted"]
        self.accelerator.stenograd.weight(labels[:, 1:].ne(-100).sum())
        return model(inputs["input_ids"], labels=labels).loss


def weighed(method, kind, folder):
    """Sentences of unlike lengths: how far counts of tokens lead from one process with all; 3.5 steps."""
    g, places, rows = torch.Generator().manual_seed(8), torch.arange(12), []
    for i in range(28):
        tokens = torch.randint(0, 64, (12,), generator=g)
        # The first is predicted by nothing; Trainer would count it.
        ignored = (places == 0) | (places > 2 + 5 * i % 10)
        rows.append({"input_ids": tokens, "labels": tokens.masked_fill(ignored, -100)})
    model = gpt()
    arguments = TrainingArguments(
        str(Path(folder, "weighed")), per_device_train_batch_size=2, gradient_accumulation_steps=2,
        num_train_epochs=1, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", max_grad_norm=0.0,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
        remove_unused_columns=False,
    )  # fmt: skip
    own = [{"input_ids": row["input_ids"], "wanted": row["labels"]} for row in rows]
    trainer = globals()[kind](model, arguments, train_dataset=own if kind == "Counting" else rows)
    attached = stenograd.transformers.use(trainer, method, timeout_s=120)
    trainer.train()
    wanted = gpt()
    optimizer, before = torch.optim.SGD(wanted.parameters(), lr=0.1), flat(wanted)
    for start in range(0, 28, 8):
        batch = {key: torch.stack([row[key] for row in rows[start : start + 8]]) for key in rows[0]}
        optimizer.zero_grad()
        wanted(**batch).loss.backward()
        optimizer.step()
    moved = (flat(wanted) - before).abs().max().item()
    difference = (flat(model) - flat(wanted)).abs().max().item()
    return {"moved": moved, "difference": difference, "ranks": attached.sync.world_size}


def launched(folder):
    """Four steps."""
    trainer, attached = trained_by(folder, 4, "topk:ratio=0.05")
    return {"world size": attached.sync.world_size, "digest": digest(trainer.model)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    scenario, *arguments = sys.argv[1:]
    end(globals()[scenario](*arguments))
