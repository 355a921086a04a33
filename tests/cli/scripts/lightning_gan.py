"""A LightningModule with two optimizers that it steps itself."""
# ruff: noqa: T201  (a script prints)

import lightning.pytorch as lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class GAN(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
        self.discriminator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, _index):
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()
        noise, ones = torch.randn(len(real), 4), torch.ones(len(real), 1)
        self.toggle_optimizer(for_generator)
        g_loss = functional.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise)), ones)
        self.manual_backward(g_loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_discriminator)
        on_real = functional.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        on_fake = self.discriminator(self.generator(noise).detach())
        d_loss = (on_real + functional.binary_cross_entropy_with_logits(on_fake, 0 * ones)) / 2
        self.manual_backward(d_loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)
        print(repr(g_loss.item()), repr(d_loss.item()))

    def configure_optimizers(self):
        return [torch.optim.Adam(m.parameters(), lr=2e-3) for m in (self.generator, self.discriminator)], []


torch.manual_seed(0)
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(GAN(), DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=4))
