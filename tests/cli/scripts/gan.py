"""A GAN's loop as in a well-known example, and a GradScaler that is off."""
# ruff: noqa: T201, N816  (a script prints, and has its own names)

import torch
from torch import nn


class Generator(nn.Sequential):
    pass


class Discriminator(nn.Sequential):
    pass


torch.manual_seed(0)
netG = Generator(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Tanh())
netD = Discriminator(nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
criterion, scaler = nn.BCEWithLogitsLoss(), torch.amp.GradScaler("cpu", enabled=False)
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-3, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.999))
for _ in range(12):
    netD.zero_grad()
    real, noise = torch.randn(6, 8) + 1, torch.randn(6, 4)
    errD_real = criterion(netD(real), torch.ones(6, 1))
    scaler.scale(errD_real).backward()
    fake = netG(noise)
    errD_fake = criterion(netD(fake.detach()), torch.zeros(6, 1))
    scaler.scale(errD_fake).backward()
    errD = errD_real + errD_fake
    scaler.step(optimizerD)
    netG.zero_grad()
    errG = criterion(netD(fake), torch.ones(6, 1))
    scaler.scale(errG).backward()
    scaler.step(optimizerG)
    scaler.update()
    print(repr(errD.item()), repr(errG.item()))
