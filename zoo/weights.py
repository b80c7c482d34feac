"""Weights: how they are drawn, and one table {theirs: ours} for a family, read both ways and strict in both.

A table names modules or tensors: {} is an index, a module means all tensors in it, and a :class:`Placement` some rows
of one of ours. Entries whose modules a config does not have are passed over, so that one table serves all configs.
Upstream libraries are imported inside the functions of a :class:`WeightMap`, never by ``import zoo``.
"""

import dataclasses
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from zoo.engine.discover import has_library_hook
from zoo.files import QUANTIZED, locate, read_tensors, replacing, upstream, write_tensors
from zoo.validate import warn

Model = TypeVar("Model", bound=nn.Module)
Table = Mapping[str, "str | Placement"]
# Zero where a checkpoint lacks it: no output in eval mode depends on it.
_OPTIONAL = "num_batches_tracked"


class WeightsWarning(UserWarning):
    """Loaded weights are NaN or infinite, or random because the checkpoint has none."""


@dataclass(frozen=True)
class Placement:
    """Where a tensor of a checkpoint goes: the whole of one of our tensors, or some of its rows."""

    name: str  # our key; in a table also a module's name
    start: int = 0  # the first row
    rows: int | None = None  # how many; None for all
    repeated: bool = False  # a second copy of tied weights, which a checkpoint may hold and must equal the first

    def of(self, ours: Mapping[str, Tensor]) -> Tensor:
        """A view of what this names among our tensors."""
        whole = ours[self.name]
        return whole if self.rows is None else whole[self.start : self.start + self.rows]


@dataclass(frozen=True, kw_only=True)
class WeightMap(Generic[Model]):
    """Conversion of one family's models from and to their upstream library."""

    name: str  # the family's
    noun: str  # what a model is, for messages: "an encoder"
    classes: tuple[type[Model], ...]  # our model classes
    table: Callable[[Any], Table]  # config to {theirs: ours}; see the module's docstring
    # The config of an upstream module. NotImplementedError if it is of another class, ValueError that names the option
    # if the zoo does not support it.
    config_of: Callable[[nn.Module], Any]
    skeleton: Callable[[Any], nn.Module]  # config to the upstream library's module, on the meta device
    build: Callable[[Any], Model] | None = None  # config to our model; the first of ``classes`` when left out
    finish: Callable[[Any], Any] = lambda module: None  # computes in place what no state dict of a module holds
    # An upstream module's tensors by the table's names, ``requires_grad`` kept.
    tensors_of: Callable[[nn.Module], Mapping[str, Tensor]] = lambda module: module.state_dict(keep_vars=True)
    # (tensors, config, source) to the tensors by the table's names and no others, for files of older releases.
    adapt: Callable[[Mapping[str, Tensor], Any, str], Mapping[str, Tensor]] | None = None
    read_config: Callable[..., Any] | None = None  # (folder, **overrides) to our config of their folder
    write_config: Callable[[Any, torch.dtype, Path], None] | None = None  # writes their config.json into a folder
    stem: str = "model"  # of the files with weights
    use_fields: tuple[str, ...] = ()  # fields of the config in which a folder may differ from a preset
    folder_fields: tuple[str, ...] = ()  # those of them that the folder decides
    # (preset, a user's ``weights``) to the file or folder they mean; FileNotFoundError if a path does not exist.
    locate: Callable[[str, Any], Path] = lambda preset, weights: locate(weights)

    def from_upstream(self, module: nn.Module) -> Model:
        """Our model with the weights of an upstream module, copied, in the same mode.

        NotImplementedError if the module is of another class. ValueError if the zoo does not support an option of it or
        the conversion would lose something: hooks, tied weights, gradient checkpointing, parts in another mode.
        """
        model, tensors, name = self._on_meta(self.config_of(module)), self.tensors_of(module), type(module).__name__
        if any(".lora_" in key for key in tensors):
            raise ValueError(f"{name} has LoRA weights beside its own: merge them first, by peft's merge_and_unload()")
        refuse_lost(module)
        places = self.places(model)
        fill(model, tensors, places, device=_device_of(tensors), dtype=None, source=name)
        ours, trained, owners = dict(model.named_parameters()), dict[str, bool](), dict[int, str]()
        for key, place in places.items():
            if place.name in ours and key in tensors:
                if (first := owners.setdefault(id(tensors[key]), place.name)) != place.name:
                    raise ValueError(f"{name}: {key} and {first} of ours would no longer be one tensor; untie them")
                wanted = tensors[key].requires_grad
                if trained.setdefault(place.name, wanted) != wanted:
                    raise ValueError(
                        f"{name}: {key}.requires_grad is {wanted}, but what shares {place.name} with it differs; rows "
                        "of one tensor are trained together"
                    )
                ours[place.name].requires_grad_(wanted)
        return model.train(module.training)

    def to_upstream(self, model: nn.Module) -> nn.Module:
        """The upstream library's module with a model's weights, copied, in the same mode.

        TypeError if the model is not of this family, ValueError if the library cannot hold it, or hooks or parts in
        another mode would be lost.
        """
        checked = self._checked(model)
        refuse_lost(checked)
        module, places, ours = self.skeleton(checked.config), self.places(checked), checked.state_dict(keep_vars=True)
        copies = {key: tensor.detach().clone() for key, tensor in self.upstream_tensors(checked).items()}
        first = {place.name: key for key, place in places.items() if not place.repeated}
        second = {key: first[place.name] for key, place in places.items() if place.repeated}
        module.load_state_dict(copies | {key: copies[of] for key, of in second.items()}, strict=True, assign=True)
        for key, of in second.items():
            owner, _, kind = key.rpartition(".")
            setattr(module.get_submodule(owner), kind, module.get_parameter(of))
        self.finish(module)
        for key, parameter in module.named_parameters():
            parameter.requires_grad_(ours[places[key].name].requires_grad)
        return module.train(model.training)

    def convert_state_dict(self, tensors: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Their tensors as ours: every key that the config needs, and no other; ValueError if they do not fit."""
        model = self._on_meta(config)
        self.fill(model, tensors, device=_device_of(tensors), source="the state dict")
        return model.state_dict()

    def fill(
        self, model: nn.Module, tensors: Mapping[str, Tensor], *, device: torch.device | str,
        dtype: torch.dtype | None = None, source: str,
    ) -> None:  # fmt: skip
        """As :func:`zoo.weights.fill`, by the zoo's keys if most of these are there, else by the upstream library's."""
        own = model.state_dict().keys()
        if 2 * len(tensors.keys() & own) > len(own):
            places = {key: Placement(key) for key in own}
        else:
            places = self.places(model)
            tensors = tensors if self.adapt is None else self.adapt(tensors, model.config, source)
        fill(model, tensors, places, device=device, dtype=dtype, source=source)

    def load(
        self, source: str | Path, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
        **overrides: Any,
    ) -> Model:  # fmt: skip
        """A model of any size from a folder or hub id in the upstream library's format, in eval mode.

        It is filled tensor by tensor: the weights are never in memory twice.

        Args:
            source: A folder with ``config.json`` and safetensors, or a hub id ``"owner/name"``.
            device: Where to; torch's default device when left out.
            dtype: Of the parameters; as they are stored when left out.
            overrides: Fields of the config to replace.

        Raises:
            FileNotFoundError: If there is no such folder, or no config or weights in it.
            ValueError: If the config has an option that the zoo does not support, or a tensor is missing, left over or
                of another shape.

        Warns:
            WeightsWarning: If a tensor is NaN or infinite, or a head had to be drawn.
        """
        assert self.read_config is not None
        check_dtype(dtype)
        path = self.locate("", source)
        if not (path / "config.json").exists():
            raise FileNotFoundError(f"{path} has no config.json; zoo.create(name, weights=...) takes weights alone")
        config = self.read_config(path, **overrides)
        return self.read(path, config, str(source), device=device, dtype=dtype)

    def read(
        self, path: Path, config: Any, source: str, *, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> Model:
        """A model of a config with the weights of a file or folder, in eval mode; arguments as for :meth:`load`."""
        model, device = self._on_meta(config), device or torch.get_default_device()
        self.fill(model, read_tensors(path), device=device, dtype=dtype, source=source)
        check_finite(model, source)
        return model.eval()

    def save(self, model: Model, folder: str | Path, *, max_shard_size: int | str = "5GB") -> None:
        """Write a model in the upstream library's format, for its ``from_pretrained(folder)``.

        The folder is made if it is not there; its weights and config are replaced once the new ones are written.
        ``max_shard_size`` is bytes of a file, or a number with KB, MB or GB. TypeError if the model is not of this
        family, ValueError if the size has another unit or the library cannot hold the model.
        """
        assert self.write_config is not None
        checked = self._checked(model)
        # Where the upstream library looks for its weights it would read quantized ones without their scales.
        stem = QUANTIZED if getattr(checked.config, "weight_dtype", None) else self.stem
        with replacing(Path(folder), f"{self.stem}*.safetensors*", f"{QUANTIZED}*.safetensors*") as new:
            dtype = next(each.dtype for each in model.parameters() if each.is_floating_point())
            self.write_config(checked.config, dtype, new)
            write_tensors(new, stem, self.upstream_tensors(checked), max_shard_size=max_shard_size)

    def config_for(self, folder: Path, config: Any, overridden: Collection[str]) -> Any:
        """A preset's config with the ``folder_fields`` of a folder's config, if any, that are not overridden.

        ValueError if the folder has another architecture, apart from overridden fields.
        """
        if self.read_config is None or not (folder / "config.json").exists():
            return config
        stored = self.read_config(folder)
        for field in dataclasses.fields(config):
            theirs, ours = getattr(stored, field.name), getattr(config, field.name)
            if theirs != ours and field.name not in {*overridden, *self.use_fields}:
                raise ValueError(
                    f"{folder}: config.json has {field.name}={theirs!r}, the preset {ours!r}; take the fitting "
                    f"preset, override {field.name}, or let zoo.{self.name}.load(folder) read the config"
                )
        taken = {name: getattr(stored, name) for name in self.folder_fields if name not in overridden}
        return dataclasses.replace(config, **taken)

    def places(self, model: Any) -> dict[str, Placement]:
        """Where each tensor of an upstream checkpoint goes in a model; ValueError if the table misses rows of one."""
        ours = model.state_dict()
        places = _expanded(self.table(model.config), ours)
        rows = {name: tensor.shape[0] if tensor.dim() else 1 for name, tensor in ours.items()}
        covered = Counter[str]()
        for place in places.values():
            covered[place.name] += 0 if place.repeated else place.rows or rows[place.name]
        if wrong := [name for name in ours if covered[name] != rows[name]]:
            raise ValueError(f"the table of {self.name} fills {wrong[:8]} not at all, in part, or twice")
        return places

    def placements(self, config: Any) -> dict[str, Placement]:
        """Where each tensor of an upstream checkpoint goes in a model of this config."""
        return self.places(self._on_meta(config))

    def upstream_tensors(self, model: Any) -> dict[str, Tensor]:
        """A model's tensors by their names in the upstream library, as views; tied weights once."""
        ours = model.state_dict()
        return {key: place.of(ours) for key, place in self.places(model).items() if not place.repeated}

    def new(self, config: Any) -> Model:
        """A randomly initialised model on the current default device and dtype."""
        return (self.build or self.classes[0])(config)

    def _on_meta(self, config: Any) -> Any:
        with torch.device("meta"):
            return self.new(config)

    def _checked(self, model: Any) -> Any:
        if not isinstance(model, self.classes):
            raise TypeError(f"{type(model).__name__} is not {self.noun} of the zoo")
        return model


def fill(
    model: nn.Module, tensors: Mapping[str, Tensor], placements: Mapping[str, Placement], *,
    device: torch.device | str, dtype: torch.dtype | None, source: str,
) -> None:  # fmt: skip
    """Load weights into a model on the meta device, so that only one tensor at a time is in memory twice.

    ``placements`` say where each key of a checkpoint goes; ``dtype`` is that of floating-point weights, None as they
    are stored; ``source`` is named in errors. A tensor that is missing, left over, of another shape or of integers is a
    ValueError that names it.
    """
    wanted = {key: place for key, place in placements.items() if not place.repeated}
    absent = wanted.keys() - tensors.keys()
    missing = sorted(key for key in absent if not wanted[key].name.endswith(_OPTIONAL))
    extra = sorted(tensors.keys() - placements.keys())
    if missing or extra:
        raise ValueError(f"{source}: missing tensors {missing[:8]}, unexpected tensors {extra[:8]}")
    expected = model.state_dict()
    made: dict[str, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad():
        for key in sorted(tensors, key=lambda key: key not in wanted):  # second copies of tied weights last
            place, tensor = placements[key], tensors[key]
            if expected[place.name].is_floating_point() and not tensor.is_floating_point():
                raise ValueError(f"{source}: {key} is {tensor.dtype}, expected floating-point numbers")
            if place.name not in made:
                kept = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
                made[place.name] = torch.empty(expected[place.name].shape, dtype=kept, device=device)
            part = place.of(made)
            if tensor.shape != part.shape:
                raise ValueError(f"{source}: {key} has shape {tuple(tensor.shape)}, expected {tuple(part.shape)}")
            if dtype is None and tensor.dtype != part.dtype:
                raise ValueError(f"{source}: {key} is {tensor.dtype}, but {place.name} has {part.dtype} for others")
            if not place.repeated:
                part.copy_(tensor)
                continue
            second = tensor.to(part)
            if not (torch.equal(part, second) or torch.allclose(part, second, rtol=0, atol=0, equal_nan=True)):
                raise ValueError(f"{source}: {key} differs from {place.name}, but the model has one tensor for both")
        for name in {wanted[key].name for key in absent}:
            made[name] = torch.zeros_like(expected[name], device=device)
    model.load_state_dict(made, strict=True, assign=True)
    for module in model.modules():
        if hasattr(module, "reset_buffers"):
            module.reset_buffers(torch.device(device))  # type: ignore[operator]
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left and torch.device(device).type != "meta":
        raise ValueError(f"{source}: nothing was loaded into {left[:8]}")


def check_finite(model: nn.Module, source: str) -> None:
    """Warn the zoo's caller if a weight is NaN or infinite."""
    broken = [name for name, tensor in model.state_dict().items() if tensor.is_floating_point() and not _finite(tensor)]
    if broken:
        message = f"{source}: {len(broken)} tensor(s) with NaN or infinite values: {', '.join(broken[:8])}"
        warn(f"{message}; warnings.simplefilter('error', zoo.WeightsWarning) makes this an error", WeightsWarning)


def check_dtype(dtype: Any) -> None:
    """ValueError unless parameters can be of this dtype; None leaves theirs as it is."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        raise ValueError(f"dtype is {dtype!r}, but parameters need a floating-point torch.dtype, as torch.bfloat16")


def initialise(module: nn.Module) -> None:
    """As transformers does: normal with deviation 0.02, biases and the padding's vectors zero, norms one."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()


def keep_channels_last(model: nn.Module) -> None:
    """Lay out the weights of all convolutions in channels_last, now and whenever a state dict was loaded."""
    _lay_out(model)
    # A loaded tensor that was assigned keeps the layout of its file.
    model.register_load_state_dict_post_hook(_lay_out)  # type: ignore[no-untyped-call]


def _lay_out(model: nn.Module, _: Any = None) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def check_class(module: nn.Module, library: str, *names: str) -> None:
    """NotImplementedError unless a module is of one of these classes of a library; a subclass may compute otherwise."""
    name = type(module).__name__
    if name not in names or type(module) is not getattr(upstream(library), name):
        what = f"{name} is not one of {', '.join(names)} of {library}, exactly"
        raise NotImplementedError(f"{what}: a subclass may compute otherwise")


def unsupported(whose: str, option: str, value: Any, why: str) -> NoReturn:
    """Refuse an option of an upstream model, such as ``"torchvision's ResNet"``, by a ValueError."""
    raise ValueError(f"{whose} with {option}={value!r} is not supported: {why}")


def refuse_changed(theirs: Mapping[str, nn.Module], made: nn.Module, whose: str, *free: str) -> None:
    """Refuse an upstream model, which errors call ``whose``, where it differs from its config's skeleton.

    The modules of one name have one class and the same options, which are plain attributes, apart from ``free`` ones.
    """
    expected = dict(made.named_modules())
    free = (*free, "training", "gradient_checkpointing", "inplace")  # refuse_lost reports the first two
    for name in {**expected, **theirs}:
        found, wanted = theirs.get(name), expected.get(name)
        if type(found) is not type(wanted):
            expects = "no such module" if wanted is None else type(wanted).__name__
            unsupported(whose, name, found, f"expected {expects}; convert an unchanged model")
        for key, value in vars(wanted).items():
            plain = isinstance(value, (bool, int, float, str, tuple, type(None))) and not key.startswith("_")
            if plain and key not in free and (given := getattr(found, key, value)) != value:
                option = f"{name}.{key}".removeprefix(".")
                unsupported(whose, option, given, f"expected {value!r}; convert an unchanged model")


# A module's own hooks, and torch-geometric's around the steps of message passing.
_HOOKS = re.compile(r"(forward|backward)(_pre)?_hooks$")


def refuse_lost(module: nn.Module) -> None:
    """Refuse a model with what its conversion would lose: parts in another mode, hooks, gradient checkpointing."""
    for path, part in module.named_modules():
        where = path or "the model itself"
        library = type(part).__module__.startswith(("torch.nn.", "peft."))  # whose other layers read no mode
        acts = isinstance(part, (_NormBase, _DropoutNd)) or not library
        if part.training != module.training and acts:
            why = "the model has another mode; put all of it in one first"
            raise ValueError(f"{where} has training={part.training}, which would be lost: {why}")
        lost = [name for name, held in vars(part).items() if _HOOKS.search(name) and held]
        if lost or has_library_hook(part):
            remedy = "convert before it is set, or remove it first, as pipe.remove_all_hooks() does"
            raise ValueError(
                f"{where} has a hook, as for offloading or casting by layer, which would be lost: {remedy}"
            )
        # Torch-geometric itself replaces ``propagate``, for decomposed layers.
        methods = (name for name in vars(part) if inspect.isfunction(getattr(type(part), name, None)))
        if own := [name for name in methods if name != "propagate"]:
            remedy = "undo that first, or compile the model as it is: zoo.compile_regions(model)"
            raise ValueError(f"{where} has a {own[0]} in place of its class's, which would be lost: {remedy}")
        if getattr(part, "gradient_checkpointing", False):
            remedy = "switch it off, and call zoo.training.checkpoint_regions on the converted model"
            raise ValueError(f"{where} has gradient_checkpointing=True, which would be lost: {remedy}")


def _expanded(table: Table, ours: Mapping[str, Tensor]) -> dict[str, Placement]:
    """A table with a line for each tensor: modules and indices filled in from our names."""
    inside: dict[str, list[str]] = defaultdict(list)  # the endings of all tensors in a module; "" of a tensor itself
    for key in ours:
        for end in [match.start() for match in re.finditer(r"\.", key)] + [len(key)]:
            inside[key[:end]].append(key[end:])
    places: dict[str, Placement] = {}
    for theirs, target in table.items():
        place = Placement(target) if isinstance(target, str) else target
        pattern = re.compile(re.escape(place.name).replace(r"\{\}", r"(\d+)"))
        names = [name for name in inside if pattern.fullmatch(name)] if "{}" in place.name else [place.name]
        for name in names:
            for ending in inside.get(name, ()):
                key = theirs.format(*pattern.fullmatch(name).groups()) + ending  # type: ignore[union-attr]
                if key in places:
                    raise ValueError(f"the table names {key} twice")
                places[key] = dataclasses.replace(place, name=name + ending)
    order = {name: index for index, name in enumerate(ours)}
    return dict(sorted(places.items(), key=lambda item: order[item[1].name]))


def _device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    return next((tensor.device for tensor in tensors.values()), torch.device("cpu"))


def _finite(tensor: Tensor) -> bool:
    """Whether all values are finite: both extremes are. Finding them takes no memory, as torch.isfinite would."""
    if tensor.is_meta or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:
        tensor = tensor.bfloat16()  # aminmax takes no float8, and bfloat16 represents all of its values
    return all(extreme.isfinite() for extreme in tensor.detach().aminmax())
