"""What a model's `config.json` says of its quantisation, where it lies beside the weights.

The fields are those of transformers: `quantization_config` with `quant_method`, and what each
method adds: `weight_block_size` (fp8); `config_groups` with `weights`, each with `num_bits`,
`group_size`, `strategy` and `block_structure` (compressed-tensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

from ema_ckpt.core.catalog import Catalog
from ema_ckpt.core.errors import AccessError, SourceError

CONFIG_FILE = "config.json"
OTHER_CONFIG_FILE = "hf_quant_config.json"
_MAX_NBYTES = 16 << 20
_FIELDS = ("quantization_config", "compression_config")
# Configurations of a model inside that of a larger one.
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
_KNOWN_METHODS = (None, "fp8", "compressed-tensors", "mxfp4", "torchao")


class QuantizationConfig(NamedTuple):
    """Settings that shapes alone do not tell; None where nothing is said, or not one thing.

    Attributes:
        method: `quant_method`. block: values that share a scale on the last two dims.
        bits: bits of a value. group: values of a row that share a scale.
    """

    method: str | None = None
    block: tuple[int, int] | None = None
    bits: int | None = None
    group: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether weights of this method are understood here."""
        return self.method in _KNOWN_METHODS


def read_config(catalog: Catalog) -> QuantizationConfig:
    """Read the quantisation settings beside a checkpoint; all None without any.

    Raises:
        SourceError: `unreadable` if `config.json` is no JSON object.
    """
    settings = _settings(_document(catalog, CONFIG_FILE))
    if settings is not None:
        return parse_config(settings)
    other = _document(catalog, OTHER_CONFIG_FILE).get("quantization")
    if isinstance(other, dict):
        return QuantizationConfig(f"modelopt {other.get('quant_algo')}")
    return QuantizationConfig()


def files_with_settings(catalog: Catalog) -> list[str]:
    """Return the files beside a checkpoint that say how its weights are quantised."""
    names = []
    for name in (CONFIG_FILE, OTHER_CONFIG_FILE):
        try:
            document = _document(catalog, name)
        except SourceError:  # no settings of ours; what quantised weights it belongs to says so
            continue
        if _settings(document) is not None or isinstance(document.get("quantization"), dict):
            names.append(name)
    return names


def without_quantization(catalog: Catalog) -> bytes | None:
    """Return `config.json` without its quantisation settings; None if it has none."""
    document = _document(catalog, CONFIG_FILE)
    found = False
    for holder in _holders(document):
        for field in _FIELDS:
            found = holder.pop(field, None) is not None or found
    if not found:
        return None
    return (json.dumps(document, indent=2, ensure_ascii=False) + "\n").encode()


def parse_config(settings: Mapping[str, object]) -> QuantizationConfig:
    """Take what matters out of a `quantization_config`."""
    method = settings.get("quant_method")
    block = _pair(settings.get("weight_block_size"))
    bits = group = None
    groups = settings.get("config_groups")
    if isinstance(groups, Mapping):
        all_weights = []
        for one in groups.values():
            weights = one.get("weights") if isinstance(one, Mapping) else None
            if isinstance(weights, Mapping):
                all_weights.append(weights)
        bits = _integer(_agreed(all_weights, "num_bits"))
        group = _integer(_agreed(all_weights, "group_size"))
        block = _pair(_agreed(all_weights, "block_structure")) or block
    name = method if isinstance(method, str) else None
    return QuantizationConfig(name, block, bits, group)


def _settings(document: Mapping[str, object]) -> Mapping[str, object] | None:
    for holder in _holders(document):
        for field in _FIELDS:
            settings = holder.get(field)
            if isinstance(settings, dict):
                return settings
    return None


def _holders(document: Mapping[str, object]) -> list[dict[str, object]]:
    """Return the configurations that may have quantisation settings, the outermost first."""
    inner = [document, *(document.get(name) for name in _INNER)]
    return [holder for holder in inner if isinstance(holder, dict)]


def _document(catalog: Catalog, name: str) -> dict[str, object]:
    """Read a JSON file beside the weights; empty if there is none."""
    source = catalog.source
    try:
        nbytes = source.size(name)
    except (SourceError, AccessError):
        return {}
    document: object = None
    if nbytes <= _MAX_NBYTES:
        try:
            document = json.loads(source.read(name, 0, nbytes))
        except (ValueError, RecursionError):
            document = None
    if not isinstance(document, dict):
        message = f"{name}: expected the JSON object of a model's configuration beside the weights"
        raise SourceError("unreadable", message, file=name)
    return document


def _agreed(groups: list[Mapping[str, object]], field: str) -> object:
    """Return the value of a field if all groups have the same."""
    values = [group.get(field) for group in groups]
    return values[0] if values and values.count(values[0]) == len(values) else None


def _integer(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None


def _pair(value: object) -> tuple[int, int] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    rows, columns = (_integer(part) for part in value)
    return None if rows is None or columns is None else (rows, columns)
