"""PEFT: adapters of a frozen model, which alone travel. Lines marked with + are Stenograd's.

torchrun --nproc-per-node 2 examples/peft_lora.py
"""

from __future__ import annotations

import json

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import stenograd  # +

world = stenograd.init()  # +
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
base = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=32, **sizes))  # random weights
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
sync = stenograd.distribute(model, optimizer, "bf16")  # +

data = torch.Generator().manual_seed(world.rank)
for _ in range(20):
    start = torch.randint(0, 32, (8, 1), generator=data)
    tokens = (start + torch.arange(16)) % 64  # to be learnt: the next token is one higher
    loss = model(input_ids=tokens, labels=tokens).loss
    optimizer.zero_grad()
    loss.backward()  # gradients of adapters are averaged over all ranks here
    optimizer.step()

held = [p for p in model.parameters() if p.requires_grad]
found = {"loss": loss.item(), "steps": sync.step, "sent": sync.traffic.moved_bytes}
found |= {"elements": sum(p.numel() for p in held), "of all": sum(p.numel() for p in model.parameters())}
print(json.dumps(found | {"norm": [p.norm().item() for p in held]}))
