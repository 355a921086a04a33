"""A script around Hugging Face's Trainer, on a small model with random weights."""
# ruff: noqa: T201  (a script prints)

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(8) * 7 + index) % 50
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=8, n_embd=16, n_layer=2, n_head=2))
    args = TrainingArguments(
        output_dir="hf",
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=args, train_dataset=Tokens())
    trainer.train()
    print("trained", trainer.state.global_step)
