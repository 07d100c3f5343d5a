"""Names of torch that are private or young: each exists, and what to do where one goes is said here."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

# Where it is looked up, its name, and the plan if torch removes it.
NAMES = [
    (torch._C, "_current_graph_task_id", "count passes by a hook on the first gradient; FSDP2 uses it too"),
    (torch._C, "_current_autograd_node", "tell DDP's static graph by ddp.static_graph in its first pass"),
    (torch._C, "_will_engine_execute_node", "weigh what torch.autograd.grad returns, too, and say so"),
    (torch.Tensor, "_use_count", "copy gradients that are a whole bucket, as all others"),
    (torch.autograd.Variable._execution_engine, "queue_callback", "DDP and FSDP2 end their passes by it too"),
    (torch.autograd.graph, "_engine_run_backward", "refuse checkpoint(use_reentrant=True) by its own name"),
    (torch.autograd.function, "BackwardCFunction", "as for _engine_run_backward"),
    (torch.autograd.profiler, "_is_profiler_enabled", "leave the spans out: record_function costs 2 us each"),
    (torch, "_foreach_copy_", "copy tensor by tensor"),
    (torch, "_foreach_norm", "norms tensor by tensor"),
    (dist.distributed_c10d, "_get_default_store", "roll calls in a user's own group name nobody"),
    (DistributedDataParallel, "_active_ddp_module", "look for DDP by module names at attaching only"),
    (torch._dynamo.decorators, "skip", "torch.compiler.disable, at a microsecond for each gradient"),
    (nn.Parameter(torch.zeros(1)), "_post_accumulate_grad_hooks", "register again before each pass"),
    (dataloader, "_MultiProcessingDataLoaderIter", "workers die of a signal to all processes of a job"),
    (torch._C, "_remove_worker_pids", "workers that are ended at exit look like an accident"),
    (torch.amp.GradScaler("cpu"), "_per_optimizer_states", "Heat's scaler keeps its own record"),
]


@pytest.mark.parametrize(("home", "name", "plan"), NAMES, ids=[name for _, name, _ in NAMES])
def test_a_private_name_is_where_we_use_it(home, name, plan):
    assert hasattr(home, name), f"torch {torch.__version__} has no {name}: {plan}"


def test_one_of_two_gathers_into_a_tensor_exists():
    """torch 2.13 renamed it, and 2.15 has dropped the old name."""
    assert hasattr(dist, "all_gather_single") or hasattr(dist, "all_gather_into_tensor")


def test_an_optimizer_keeps_its_hooks_where_we_look():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert "_optimizer_step_pre_hooks" in vars(optimizer)  # by which wrapped optimizers are told from bare
