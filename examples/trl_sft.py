"""TRL: supervised fine-tuning, with adapters by PEFT. Lines marked with + are Stenograd's.

torchrun --nproc-per-node 2 examples/trl_sft.py
"""

from __future__ import annotations

import json
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import stenograd.transformers  # +

words = ["<pad>", "<eos>", *(f"w{i}" for i in range(30))]
tokens = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
tokens.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")
texts = [" ".join(words[2 + (start + i) % 30] for i in range(12)) for start in range(64)]

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), max_position_embeddings=32, **sizes))

with tempfile.TemporaryDirectory() as folder:
    arguments = SFTConfig(
        folder,
        max_steps=10,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        max_length=16,
        use_cpu=True,
        bf16=False,
        ddp_backend="gloo",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
    )
    attached = stenograd.transformers.use(trainer, "bf16")  # +
    output = trainer.train()

held = [p for p in trainer.model.parameters() if p.requires_grad]
found = {"loss": output.training_loss, "steps": attached.sync.step, "sent": attached.traffic.moved_bytes}
found |= {"elements": sum(p.numel() for p in held)}
print(json.dumps(found | {"norm": [p.norm().item() for p in held]}))
