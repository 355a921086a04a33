"""Models, weights and batches from files, without running any code of them.

Files are Hugging Face folders, state dicts and safetensors.
"""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from plimsoll.errors import ArgumentError, MissingExtraError
from plimsoll.extras import install_line

_CONFIG = "config.json"
_TENSORS = ".safetensors"
_NESTED = ("state_dict", "model_state_dict", "model")  # keys under which trainers keep the weights
# Heads whose labels are the tokens themselves.
_PREDICTS_TOKENS = ("ForCausalLM", "LMHead", "ForMaskedLM", "ForConditionalGeneration")
_ROWS, _LENGTH = 4, 64  # of a batch of tokens


def is_model_folder(path: Path) -> bool:
    """Return whether a folder has a model of transformers."""
    return (path / _CONFIG).is_file()


def load_model(folder: Path) -> tuple[nn.Module, list[str]]:
    """Return a Hugging Face folder's model in FP32 and evaluation mode, and remarks. No code of it is run."""
    transformers = _extra("transformers")
    bars = transformers.utils.logging
    shows_bars = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        names = getattr(config, "architectures", None) or ["AutoModel"]
        architecture = getattr(transformers, names[0])
        model, info = architecture.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"probe: expected a model folder that transformers reads from safetensors; got {os.fspath(folder)!r} "
            f"({type(error).__name__}: {reason}). Save it with save_pretrained."
        ) from error
    finally:
        if shows_bars:
            bars.enable_progress_bar()
    missing = sorted(info["missing_keys"])
    remarks = [f"{len(missing)} weights are missing in the files and are random: {missing[0]}."] if missing else []
    return model.float().eval(), remarks


def load_weights(path: Path) -> dict[str, Tensor]:
    """Return floating tensors of a state dict, safetensors, or a folder of these."""
    files = sorted(path.glob(f"*{_TENSORS}")) if path.is_dir() else [path]
    named = {name: x for file in files for name, x in _tensors(_read(file)).items() if x.is_floating_point()}
    if not named:
        raise ArgumentError(
            f"probe: expected a model folder, or a file of tensors; got {os.fspath(path)!r}, which has none. Save "
            "model.state_dict()."
        )
    return named


def _tensors(read: Any) -> dict[str, Tensor]:
    if isinstance(read, Mapping):
        found = cast("Mapping[Any, Any]", read)
        inner = next((found[key] for key in _NESTED if isinstance(found.get(key), Mapping)), found)
        return {str(name): x for name, x in inner.items() if isinstance(x, Tensor)}
    return {}


def _read(file: Path) -> Any:
    try:
        if file.suffix == _TENSORS:
            return _extra("safetensors.torch").load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except MissingExtraError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise ArgumentError(
            f"probe: expected a file of tensors, from torch.save or safetensors; got {os.fspath(file)!r} "
            f"({type(error).__name__}: {reason}). Save model.state_dict(); objects of other classes are not read."
        ) from error


def batches_of(data: object, most: int) -> list[Any]:
    """Return the first batches of data: a batch, an iterable, or a file of either."""
    if isinstance(data, str | os.PathLike):
        data = _read(Path(cast("str", data)))
    if isinstance(data, Tensor | Mapping):
        return [data]
    found: list[Any] = list(itertools.islice(cast("Any", data), most)) if isinstance(data, Iterable) else []
    if not found:
        raise ArgumentError(
            f"probe: expected data as batches that the model takes; got none in {cast('Any', data)!r:.80}. Pass a list "
            "of batches or a loader."
        )
    return found


def random_tokens(model: nn.Module, batches: int) -> list[Any]:
    """Return batches of random tokens for a model of transformers."""
    config: Any = model.config
    size = getattr(config, "vocab_size", None)
    if getattr(model, "main_input_name", None) != "input_ids" or not isinstance(size, int):
        raise ArgumentError(
            f"probe: expected data for {type(model).__name__}, which does not take tokens; got none. Give batches with "
            "data= or --data."
        )
    length = min(_LENGTH, int(getattr(config, "max_position_embeddings", None) or _LENGTH) // 2)
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(size, (_ROWS, length), generator=generator, device="cpu")} for _ in range(batches)
    ]


def with_labels(model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """Yield batches, with tokens as labels if the model needs them and has none."""
    predicts = any(word in type(model).__name__ for word in _PREDICTS_TOKENS)
    for batch in batches:
        if predicts and isinstance(batch, Mapping) and "input_ids" in batch and "labels" not in batch:
            given = cast("Mapping[str, Any]", batch)
            yield {**given, "labels": given["input_ids"]}
        else:
            yield batch


def _extra(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"probe: expected the package {module.partition('.')[0]}; got none. Install it: "
            f"{install_line('transformers')}"
        ) from error
