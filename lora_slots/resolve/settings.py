"""What an adapter's config means here: ranks and scalings, and the features that are refused."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lora_slots.errors import AdapterFileError, UnsupportedAdapterError

# Keys of PEFT's LoraConfig that settle ranks and scalings.
_APPLIED = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
# The types of adapters that are low-rank updates, each with PEFT's class for its config and with
# the keys that it calls otherwise; only LORA has use_rslora.
_CLASSES = {"LORA": "LoraConfig", "LOHA": "LoHaConfig", "LOKR": "LoKrConfig"}
_RENAMED = {"lora_alpha": "alpha"}

# Keys that speak of training, of coverage (the tensors settle that) or of how a weight is stored.
_IRRELEVANT = frozenset(
    {
        "task_type",
        "peft_type",
        "auto_mapping",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "lora_dropout",
        "fan_in_fan_out",
        "layers_to_transform",
        "layers_pattern",
        "megatron_config",
        "megatron_core",
        "runtime_config",
        "eva_config",
        "lora_ga_config",
        "corda_config",
        "loftq_config",
        "qalora_group_size",
        "velora_config",
        "ensure_weight_tying",
        # Their tensors say so, too.
        "use_dora",
        "lora_bias",
        "trainable_token_indices",
        # Of LoHa and LoKr; their tensors say the rest.
        "rank_dropout",
        "rank_dropout_scale",
        "module_dropout",
        "use_effective_conv2d",
        "decompose_both",
        "decompose_factor",
        "init_weights",
    }
)

# Initialisations that leave the base weight as it was. The others (PiSSA, OLoRA, CorDA, LoftQ,
# LoRA-GA) change it, so their adapters fit another base until PEFT converts them on saving.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")

# Keys that ask for whole tensors beside the low-rank ones; the tensors themselves are reported.
WHOLE_TENSOR_KEYS = {
    "modules_to_save": "modules_to_save",
    "bias": "bias",
}

_LARGEST = float(np.finfo(np.float32).max)

_FEATURES = {
    "alora_invocation_tokens": "aLoRA",
    "layer_replication": "layer_replication",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "Monte Carlo LoRA",
}


@dataclass(frozen=True)
class LoraSettings:
    """Rank and scaling of every module of one adapter, by PEFT's rules.

    Source: ``peft.tuners.lora``: ``LoraConfig``, ``LoraModel._create_and_replace`` and
    ``LoraLayer.update_layer``, and the same of ``loha`` and ``lokr``; rsLoRA, arXiv:2312.03732.
    """

    r: int
    lora_alpha: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    source: str

    @classmethod
    def of(cls, config: Mapping[str, Any], source: str) -> LoraSettings:
        """Read a config with PEFT's class, whose defaults stand for missing keys.

        Raises:
            UnsupportedAdapterError: The config asks for something that is not applied here.
            AdapterFileError: A value has no meaning.
        """
        refuse_features(config, source)
        names = _names(config_type(config))
        given = {key: config[name] for key, name in names.items() if name in config}
        if "use_rslora" not in names:
            given["use_rslora"] = False
        for key in ("rank_pattern", "alpha_pattern"):
            given[key] = given.get(key) or {}
        if len(given) < len(_APPLIED):
            given = _defaults(config_type(config)) | given
        settings = cls(**given, source=source)
        settings._check_values()
        return settings

    def _check_values(self) -> None:
        for key in ("rank_pattern", "alpha_pattern"):
            pattern = getattr(self, key)
            if not isinstance(pattern, Mapping):
                raise AdapterFileError(
                    f"{key} in the config of {self.source} must be an object, got {pattern!r}"
                )
            for module in pattern:
                try:
                    re.compile(module)
                except re.error as error:
                    raise AdapterFileError(
                        f"{key} in the config of {self.source} has the key {module!r}, which is no "
                        f"valid regular expression: {error}"
                    ) from error
        for key, rank in [("r", self.r), *self.rank_pattern.items()]:
            if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
                raise AdapterFileError(
                    f"a rank must be a whole number from 1, got {rank!r} for {key!r} in the "
                    f"config of {self.source}"
                )
        for key, alpha in [("lora_alpha", self.lora_alpha), *self.alpha_pattern.items()]:
            if isinstance(alpha, bool) or not isinstance(alpha, int | float):
                raise AdapterFileError(
                    f"an alpha must be a number, got {alpha!r} for {key!r} in the config of "
                    f"{self.source}"
                )
            check_alpha(alpha, key, self.source)

    def rank(self, module: str) -> int:
        """The rank that the config gives to ``module``, a path without ``base_model.model.``."""
        return self.rank_pattern.get(_pattern_key(self.rank_pattern, module), self.r)

    def scaling(self, module: str, rank: int, alpha: float | None = None) -> float:
        """``alpha / rank``, or ``alpha / sqrt(rank)`` under rsLoRA.

        Args:
            module: A path without ``base_model.model.``.
            rank: The rank of the module's tensors.
            alpha: What a ``.alpha`` tensor of the file says; it beats the config.
        """
        if alpha is None:
            key = _pattern_key(self.alpha_pattern, module)
            alpha = self.alpha_pattern.get(key, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def warn_of_unused_patterns(self, modules: Iterable[str]) -> None:
        """Warn of pattern keys that match no module of the adapter and so change nothing."""
        names = list(modules)
        for key, pattern in (
            ("rank_pattern", self.rank_pattern),
            ("alpha_pattern", self.alpha_pattern),
        ):
            used = {_pattern_key(pattern, name) for name in names}
            unused = [
                module
                for module in pattern
                if module not in used and not any(_matches(module, name) for name in names)
            ]
            if unused:
                warnings.warn(
                    f"{key} in the config of {self.source} has keys that match no module of the "
                    f"adapter and change nothing: {', '.join(map(repr, unused[:3]))}",
                    stacklevel=2,
                )


@functools.cache
def _defaults(kind: str) -> dict[str, Any]:
    """What PEFT takes for missing keys; importing it takes seconds, so only where it must be."""
    import peft

    config = getattr(peft, _CLASSES[kind])()
    return {key: getattr(config, name) for key, name in _names(kind).items()}


def config_type(config: Mapping[str, Any]) -> str:
    """The ``peft_type`` of a config, in capitals; ``LORA`` where it names none."""
    kind = config.get("peft_type")
    return str(getattr(kind, "value", kind) or "LORA").upper()


def _names(kind: str) -> dict[str, str]:
    """What the config of an adapter of this type calls each of the keys that are applied."""
    if kind == "LORA":
        return {key: key for key in _APPLIED}
    return {key: _RENAMED.get(key, key) for key in _APPLIED if key != "use_rslora"}


def refuse_features(config: Mapping[str, Any], source: str) -> None:
    """Raise for everything that a config means and that is not applied here; warn of the unknown.

    Raises:
        UnsupportedAdapterError: Names the feature.
    """
    kind = config_type(config)
    if kind not in _CLASSES:
        raise UnsupportedAdapterError(
            f"{source} has the peft_type {kind}; only {', '.join(_CLASSES)} adapters are low-rank "
            "updates that slots can hold"
        )
    for key, feature in _FEATURES.items():
        if config.get(key) not in (None, False, [], {}):
            raise UnsupportedAdapterError(
                f"{source} uses {feature} ({key}={config[key]!r}), which is not applied here"
            )
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise UnsupportedAdapterError(
            f"{source} was initialised by {init!r}, which changes the base weight, and was not "
            "converted; save it with PEFT's "
            "save_pretrained(path_initial_model_for_weight_conversion=)"
        )
    applied = _names(kind).values()
    known = {*applied, *_IRRELEVANT, *WHOLE_TENSOR_KEYS, *_FEATURES, "init_lora_weights"}
    unknown = sorted(key for key, value in config.items() if key not in known and value)
    if unknown:
        warnings.warn(
            f"the config of {source} has keys that are not known here and are ignored: "
            f"{', '.join(unknown)}",
            stacklevel=2,
        )


def whole_tensor_features(config: Mapping[str, Any]) -> list[str]:
    """The features of a config that replace whole tensors of the model, by their keys."""
    return [
        f"{key}={config[key]!r}"
        for key in WHOLE_TENSOR_KEYS
        if config.get(key) not in (None, False, [], {}, "none")
    ]


def check_alpha(alpha: float, where: str, source: str) -> None:
    """Refuse an alpha that is NaN or infinite. Negative, fractional and zero alphas are valid.

    Raises:
        AdapterFileError: Names the place.
    """
    if not abs(alpha) <= _LARGEST:  # also where it is NaN
        raise AdapterFileError(
            f"an alpha must be a finite float32, got {alpha!r:.40} for {where!r} in {source}"
        )


def _pattern_key(pattern: Mapping[str, Any], module: str) -> str:
    if not pattern:
        return module
    from peft.utils.other import get_pattern_key

    key: str = get_pattern_key(list(pattern), module)
    return key


def _matches(pattern: str, module: str) -> bool:
    from peft.utils.other import get_pattern_key

    return bool(get_pattern_key([pattern], module) == pattern)
