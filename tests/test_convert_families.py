"""What only one family meets in conversion: heads, tokens, conditions, pretrained weights by name, old folders."""

import gc
import importlib
import json
from pathlib import Path
from typing import Any

import huggingface_hub
import peft
import pytest
import torch
import transformers
from diffusers import UNet2DConditionModel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary
from torchvision import models

import zoo
from tests import bert_reference as bert
from tests import llm_reference as llm
from tests import unet_reference as unet
from zoo.bert import Bert
from zoo.llm import LLM, RopeScaling
from zoo.resnet.convert import find_weights
from zoo.unet import PRESETS as UNETS
from zoo.unet.convert import upstream_config


def convert(module: nn.Module) -> Any:
    model = zoo.from_upstream(module)
    assert isinstance(model, (Bert, LLM)) and model.training == module.training
    return model


@pytest.mark.parametrize(("kind", "head"), bert.CASES)
def test_outputs_and_losses(kind: str, head: str) -> None:
    theirs = bert.make(kind, head)
    model = convert(theirs)
    assert (model.config.kind, model.config.head) == (kind, head)
    batch, labels = bert.batch(kind), bert.labels(head)
    ids = batch["input_ids"]
    shifted = torch.arange(7, 18)[None]
    with torch.inference_mode():
        for inputs in (
            {**batch, "attention_mask": batch["attention_mask"].bool(), "position_ids": shifted},
            {"input_ids": ids, "position_ids": shifted.expand(4, -1).flip(1)},
            {"input_ids": ids.int(), **labels},
        ):
            bert.compare(model(**inputs), theirs(**inputs))
        # Positionally, as upstream's first four.
        bert.compare(
            model(ids, batch["attention_mask"], batch["token_type_ids"], shifted),
            theirs(ids, batch["attention_mask"], batch["token_type_ids"], shifted),
        )


@pytest.mark.parametrize("kind", bert.KINDS)
@pytest.mark.parametrize(
    ("options", "shape", "dtype"),
    [
        ({"num_labels": 1}, (4,), torch.float32),
        ({"num_labels": 1}, (4, 1), torch.float32),
        ({"num_labels": 3}, (4, 3), torch.float32),
        ({"num_labels": 3, "problem_type": "regression"}, (4, 3), torch.float32),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, (4, 3), torch.float32),
        ({"num_labels": 3, "problem_type": "single_label_classification"}, (4,), torch.int64),
        ({"num_labels": 3, "classifier_dropout": 0.3}, (4, 1), torch.int32),
    ],
)
def test_losses_of_sequences(kind: str, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    theirs = bert.make(kind, "sequence-classification", **options)
    model = convert(theirs)
    labels = torch.randint(0, 2, shape).to(dtype)
    batch = bert.batch(kind)
    their_labels = labels.long() if dtype == torch.int32 else labels
    with torch.inference_mode():
        # Theirs remembers the problem in its config at the first call; ours has converted before.
        bert.compare(model(**batch, labels=labels), theirs(**batch, labels=their_labels))


def test_dropout_matches_transformers() -> None:
    """Means over many draws agree where single draws cannot: their order differs."""
    options = {"hidden_dropout_prob": 0.4, "attention_probs_dropout_prob": 0.4, "classifier_dropout": 0.4}
    ids = bert.batch("bert", rows=1, tokens=4)["input_ids"].expand(4000, -1)
    for kind in bert.KINDS:
        theirs = bert.make(kind, "sequence-classification", **options).train()
        model = convert(theirs)
        with torch.no_grad():
            ours, expected = model(ids).logits, theirs(ids).logits
        spread = expected.std(0)
        assert ((ours.mean(0) - expected.mean(0)).abs() < 6 * spread * (2 / 4000) ** 0.5).all()
        assert ((ours.std(0) / spread).log().abs() < 0.1).all()
        model.eval(), theirs.eval()
        assert not torch.allclose(ours.std(0), model(ids).logits.std(0))


def test_a_folder_that_lacks_a_tensor(tmp_path: Path) -> None:
    zoo.bert.save(zoo.create("bert-debug", head="masked-lm"), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    # A whole head that is missing would start from random weights.
    del stored["cls.predictions.bias"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors \['cls.predictions.bias'\]"):
        zoo.bert.load(tmp_path)


@pytest.mark.parametrize("kind", bert.KINDS)
def test_a_new_head_on_a_pretrained_encoder(kind: str, tmp_path: Path) -> None:
    theirs = bert.make(kind, "masked-lm")
    theirs.save_pretrained(tmp_path)
    with pytest.warns(zoo.WeightsWarning, match="starts from random weights and needs training") as caught:
        model = zoo.bert.load(tmp_path, head="token-classification", num_labels=5)
    assert [warning.filename for warning in caught] == [__file__] and model.head.classifier.weight.shape == (5, 32)
    assert 0.01 < float(model.head.classifier.weight.detach().std()) < 0.03
    encoder = getattr(theirs, kind)
    batch = bert.batch(kind)
    with torch.inference_mode():
        expected = encoder(**batch).last_hidden_state
        # Neither a pooler nor anything else is needed, and the head of masked words is left out.
        got = zoo.bert.load(tmp_path, head="none")(**batch).last_hidden_state
    assert bert.relative_error(got, expected) < 1e-5
    with pytest.warns(UserWarning, match="has no pooler"):
        zoo.bert.load(tmp_path, head="pooled")


def test_an_encoder_alone_carries_a_head(tmp_path: Path) -> None:
    bert.make("bert", "pooled").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="has no sequence-classification head") as caught:
        model = zoo.bert.load(tmp_path, head="sequence-classification")
    # Its pooler was there.
    assert len(caught) == 1
    stored = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(model.head.dense.weight.detach(), stored["pooler.dense.weight"], rtol=0, atol=0)


def test_names_of_old_releases(tmp_path: Path) -> None:
    """As published: the norms' old names, two heads, a buffer."""
    theirs = transformers.BertForPreTraining(transformers.BertConfig(**bert.SIZES)).eval()
    theirs.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for key, tensor in stored.items()
    }
    assert len(old.keys() - stored.keys()) == 2 * (2 * 3 + 2)
    old["bert.embeddings.position_ids"] = torch.arange(40)[None]
    save_file(old, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = zoo.bert.load(tmp_path)
    assert model.config.head == "masked-lm"
    batch = bert.batch("bert")
    with torch.inference_mode():
        expected = theirs(**batch)
        assert bert.relative_error(model(**batch).logits, expected.prediction_logits) < 1e-5
        pooled = zoo.bert.load(tmp_path, head="pooled")(**batch).pooler_output
        assert bert.relative_error(pooled, theirs.bert(**batch).pooler_output) < 1e-5


def test_tokens_are_kept_but_for_a_padding_token_of_minus_one_that_would_freeze_a_row() -> None:
    theirs = llm.make("llama", pad_token_id=3, bos_token_id=1, eos_token_id=[2, 5])
    config = convert(theirs).config
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (3, 1, (2, 5))
    assert zoo.to_upstream(zoo.from_upstream(theirs)).config.eos_token_id == [2, 5]
    assert convert(llm.make("llama", eos_token_id=7)).config.eos_token_id == (7,)
    assert convert(llm.make("llama")).config.eos_token_id == ()
    theirs.generation_config.eos_token_id = 4  # which their generate stops at
    assert zoo.from_upstream(theirs).config.eos_token_id == (4,)
    # torch counts padding_idx=-1 from the end: transformers' last token would get no gradient.
    model = convert(llm.make("llama", pad_token_id=-1))
    last = model.config.vocab_size - 1
    model(torch.tensor([[3, last]])).sum().backward()
    assert model.config.pad_token_id is None and model.embed_tokens.weight.grad[last].norm() > 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_of_peft_are_refused_with_what_merges_them() -> None:
    adapted = peft.get_peft_model(llm.make("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for model, error in ((adapted, TypeError), (adapted.base_model.model, ValueError)):
        with pytest.raises(error, match=r"merge_and_unload\(\)"):
            zoo.from_upstream(model)
    assert isinstance(zoo.from_upstream(adapted.merge_and_unload()), LLM)


def test_published_frequencies_of_llama_and_options_without_a_class_of_theirs() -> None:
    config = zoo.create("llama-3.2-1b", device="meta").config
    assert config.rope_theta == 500000.0 and config.max_position_embeddings == 131072
    assert config.rope_scaling == RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    with pytest.raises(ValueError, match="qkv_bias and qk_norm"):
        zoo.to_upstream(zoo.create("llm-debug", qkv_bias=True, qk_norm=True))


# The debug preset as one of theirs; its config.json then agrees with the preset.
PRESET = "llm-debug"


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


def test_a_preset_takes_a_folder_that_agrees_but_for_overrides(tmp_path: Path) -> None:
    zoo.llm.save(zoo.create(PRESET, dtype=torch.bfloat16), tmp_path)
    # How long texts may be is the user's to choose; what is computed is not, unless it is said.
    model = zoo.create(PRESET, weights=tmp_path, max_position_embeddings=64)
    assert model.rotary.table.shape == (64, 16) and zoo.llm.load(tmp_path).rotary.table.dtype is torch.float32
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    for model in (zoo.create(PRESET, weights=tmp_path), zoo.llm.load(tmp_path)):
        assert model.config.eos_token_id == (5, 9)
    assert zoo.create(PRESET, weights=tmp_path, eos_token_id=(3,)).config.eos_token_id == (3,)
    (tmp_path / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match=r"config.json has rms_norm_eps=0.001, the preset 1e-05"):
        zoo.create(PRESET, weights=tmp_path)
    for eps in (1e-3, 1e-4):
        assert zoo.create(PRESET, weights=tmp_path, rms_norm_eps=eps).config.rms_norm_eps == eps


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside that were alive at once; storages mapped from a file do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self.most, self.mapped = 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not out.is_meta and not out._is_view():
            if func is torch.ops.aten.lift_fresh.default:  # as safetensors makes its tensors
                self.mapped.add(out.untyped_storage().data_ptr())
            self.alive[out] = out.untyped_storage().nbytes()
            storages = {tensor.untyped_storage().data_ptr(): size for tensor, size in self.alive.items()}
            self.most = max(self.most, sum(size for place, size in storages.items() if place not in self.mapped))
        return out


def test_weights_are_never_in_memory_twice(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256, "tie_word_embeddings": False}
    source = zoo.create(PRESET, **sizes)
    total = sum(parameter.nbytes for parameter in source.parameters())
    largest = max(parameter.nbytes for parameter in source.parameters())
    zoo.llm.save(source, tmp_path, max_shard_size=200_000)
    assert len(files(tmp_path)) > 10 and total > 10 * largest
    del source
    gc.collect()
    with LiveBytes() as live:
        model = zoo.llm.load(tmp_path)
    table = model.rotary.table.nbytes
    assert total <= live.most < total + 2 * largest + 3 * table


def test_tied_weights_stored_twice_buffers_and_configs_of_old_releases(tmp_path: Path) -> None:
    model = zoo.create(PRESET)
    zoo.llm.save(model, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in state
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(state, tmp_path / "model.safetensors")
    assert zoo.llm.load(tmp_path).lm_head is None
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert zoo.llm.load(tmp_path).config == model.config


@pytest.mark.parametrize("kept", [0, 10, 500], ids=["nothing", "its size", "the beginning"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_file_that_was_cut_off_is_named(name: str, kept: int, tmp_path: Path) -> None:
    zoo.llm.save(zoo.create(PRESET), tmp_path)
    if name.endswith(".bin"):
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / name)
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"{name} is cut off or damaged.*; fetch or save it again"):
        zoo.llm.load(tmp_path)


def test_a_missing_file_and_a_wrong_size_are_named(tmp_path: Path) -> None:
    zoo.llm.save(zoo.create(PRESET), tmp_path, max_shard_size="50KB")
    (tmp_path / files(tmp_path)[1]).unlink()
    with pytest.raises(FileNotFoundError, match="names model-00002-of-"):
        zoo.llm.load(tmp_path)
    for size in ("5 lots", "GB"):
        with pytest.raises(ValueError, match=size):
            zoo.llm.save(zoo.create(PRESET), tmp_path, max_shard_size=size)


def test_dropout_is_drawn_where_diffusers_draws_it() -> None:
    theirs = unet.make("sd", dropout=0.3).train()
    ours, inputs = zoo.from_upstream(theirs), unet.inputs(theirs)
    assert ours.training
    found = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        with torch.no_grad():
            found.append(model(**inputs).sample)
    # The layout of memory decides which element gets which draw, so that only the strength can be compared.
    assert not torch.allclose(found[0], ours.eval()(**inputs).sample)
    assert 0.5 < float((found[0].std() / found[1].std()).detach()) < 2.0


def test_timesteps_in_every_form() -> None:
    theirs = unet.make("sd")
    ours, inputs = zoo.from_upstream(theirs), unet.inputs(theirs)
    for timestep in (7, 7.5, torch.tensor(7), torch.tensor([7]), torch.tensor([7, 900]), torch.tensor([1.5, 2.25])):
        inputs["timestep"] = timestep
        with torch.no_grad():
            assert unet.relative_error(ours(**inputs).sample, theirs(**inputs).sample) < 1e-5


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("case", ["sd", "xl"])
def test_masks_of_the_text(case: str, kind: torch.dtype) -> None:
    theirs = unet.make(case)
    ours, inputs = zoo.from_upstream(theirs), unet.inputs(theirs)
    mask = torch.tensor([[1, 1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 1, 1, 1]]).to(kind)
    with torch.no_grad():
        whole = ours(**inputs).sample
        expected = theirs(**inputs, encoder_attention_mask=mask).sample
        found = ours(**inputs, encoder_attention_mask=mask).sample
        inputs["encoder_hidden_states"][mask == 0] = 100.0
        blind = ours(**inputs, encoder_attention_mask=mask).sample
    assert unet.relative_error(found, expected) < 1e-5
    assert unet.relative_error(found, whole) > 1e-3
    assert unet.relative_error(blind, found) < 1e-5


@pytest.mark.parametrize("case", ["sd", "xl", "three levels", "one level"])
def test_residuals_of_a_controlnet(case: str) -> None:
    theirs = unet.make(case)
    ours, inputs = zoo.from_upstream(theirs), unet.inputs(theirs)
    added = unet.controlnet(ours.config)
    with torch.no_grad():
        expected = theirs(**inputs, **added).sample
        assert unet.relative_error(ours(**inputs, **added).sample, expected) < 1e-5
        assert unet.relative_error(ours(**inputs).sample, expected) > 1e-2


THEIRS: dict[str, dict[str, Any]] = {
    "sd15": {"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8},
    "sd21": {
        "sample_size": 96, "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True, "upcast_attention": True, "dual_cross_attention": False,
        "num_class_embeds": None,
    },
    "sdxl": {
        "sample_size": 128, "block_out_channels": [320, 640, 1280],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10], "attention_head_dim": [5, 10, 20], "cross_attention_dim": 2048,
        "use_linear_projection": True, "addition_embed_type": "text_time", "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": 2816,
    },
}  # fmt: skip
# As published.
PARAMETERS = {"sd15": 859_520_964, "sd21": 865_910_724, "sdxl": 2_567_463_684}


@pytest.mark.parametrize("name", [*THEIRS, *(name for name in zoo.resnet.PRESETS if not name.endswith("-debug"))])
def test_presets_are_the_published_models(name: str) -> None:
    with torch.device("meta"):
        theirs = UNet2DConditionModel(**THEIRS[name]) if name in THEIRS else getattr(models, name)()
    family = zoo.unet if name in THEIRS else zoo.resnet
    assert family.convert.config_of(theirs) == family.PRESETS[name]
    found, expected = (sum(p.numel() for p in each.parameters()) for each in (zoo.create(name, device="meta"), theirs))
    assert found == expected == PARAMETERS.get(name, expected)


WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"


def test_presets_take_the_folder_of_a_pipeline(tmp_path: Path) -> None:
    source = zoo.create("unet-debug")
    zoo.unet.save(source, tmp_path / "pipe" / "unet")
    for place in (tmp_path / "pipe", tmp_path / "pipe" / "unet", tmp_path / "pipe" / "unet" / WEIGHTS_FILE):
        model = zoo.create("unet-debug", weights=place)
        torch.testing.assert_close(model.state_dict(), source.state_dict(), rtol=0, atol=0)
    assert zoo.create("unet-debug", weights=tmp_path / "pipe", sample_size=32).config.sample_size == 32


@pytest.mark.parametrize("inside", ["unet", "."])
def test_of_a_hub_id_the_unet_alone_is_fetched(inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = zoo.create("unet-debug")
    zoo.unet.save(source, tmp_path / inside)
    asked: list[tuple[str, list[str]]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    inputs = zoo.example_inputs(source)
    for model in (zoo.create("unet-debug", weights="someone/pipe-1.5"), zoo.unet.load("someone/pipe-1.5")):
        with torch.no_grad():
            assert torch.equal(model(**inputs).sample, source(**inputs).sample)
    assert [name for name, _ in asked] == ["someone/pipe-1.5"] * 2
    wanted = asked[0][1]
    assert f"unet/{WEIGHTS_FILE}" in wanted and "config.json" in wanted and "*.safetensors" not in wanted


def test_files_of_old_releases(tmp_path: Path) -> None:
    """A config.json that says little leaves diffusers' defaults; what older releases wrote is not in the way."""
    theirs = UNet2DConditionModel(**unet.SIZES).eval()
    theirs.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    short = {key: value for key, value in stored.items() if key in unet.SIZES}
    (tmp_path / "config.json").write_text(json.dumps({**short, "upcast_softmax": False, "_diffusers_version": "0.2.2"}))
    inputs = unet.inputs(theirs)
    with torch.inference_mode():
        assert unet.relative_error(zoo.unet.load(tmp_path)(**inputs).sample, theirs(**inputs).sample) < 1e-5


CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    *((family, {"model_type": "gpt2"}, "model_type='gpt2' is not supported") for family in ("bert", "llm")),
    ("llm", transformers.LlamaConfig(mlp_bias=True).to_dict(), "mlp_bias=True"),
    ("unet", {"_class_name": "AutoencoderKL"}, "config.json is of a AutoencoderKL"),
    *(
        ("unet", {**upstream_config(UNETS["unet-debug"]), **options}, words)
        for options, words in (
            ({"encoder_hid_dim_type": "text_proj"}, "encoder_hid_dim_type='text_proj'"),
            ({"cross_attention_dim": [24, 32]}, r"cross_attention_dim is \[24, 32\], expected a positive integer"),
            ({"norm_num_groups": None}, "norm_num_groups is None"),
            ({"brand_new": 1}, "brand_new=1"),
        )
    ),
]


@pytest.mark.parametrize(("family", "config", "words"), CONFIGS, ids=[words for *_, words in CONFIGS])
def test_configs_that_are_refused(family: str, config: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=words):
        importlib.import_module(f"zoo.{family}").load(tmp_path)


NAMES = [
    "IMAGENET1K_V1", "DEFAULT", "ResNet18_Weights.IMAGENET1K_V1", "ResNet18_Weights.DEFAULT",
    models.ResNet18_Weights.IMAGENET1K_V1,
]  # fmt: skip


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str | None]]:
    """Answers downloads into an empty cache with the weights of a new model, and notes what was asked for."""
    asked: list[tuple[str, str | None]] = []

    def download(url: str, file: str, digest: str | None = None, progress: bool = True) -> None:
        asked.append((url, digest))
        name = url.rpartition("/")[2].partition("-")[0]
        torch.manual_seed(7)
        torch.save(getattr(models, name)().state_dict(), file)

    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    return asked


@pytest.mark.parametrize("weights", NAMES, ids=str)
def test_torchvisions_weights_by_name(server: list[tuple[str, str | None]], weights: Any) -> None:
    model = zoo.create("resnet18", weights=weights)
    torch.manual_seed(7)
    theirs = models.resnet18().eval()
    images = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), theirs(images), rtol=1e-4, atol=1e-4)
    url = models.ResNet18_Weights.IMAGENET1K_V1.url
    assert server == [(url, url.rpartition("-")[2].removesuffix(".pth"))]
    zoo.create("resnet18", weights=weights)
    assert len(server) == 1  # from the cache


@pytest.mark.parametrize(
    ("preset", "weights", "words"),
    [
        ("resnet50", "IMAGENET1K_V3", "'IMAGENET1K_V3'; resnet50 has IMAGENET1K_V1, IMAGENET1K_V2, DEFAULT"),
        ("resnet50", "ResNet18_Weights.IMAGENET1K_V1", r"weights is .ResNet18_Weights\.IMAGENET1K_V1.; resnet50 has"),
        ("resnet50", models.ViT_B_16_Weights.DEFAULT, "; resnet50 has"),
        ("resnet50", 3, "weights is 3"),
        ("resnet-debug", "IMAGENET1K_V1", "resnet-debug has none that torchvision knows"),
    ],
    ids=str,
)
def test_names_that_do_not_exist_or_fit(server: list[Any], preset: str, weights: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        zoo.create(preset, weights=weights)
    assert not server


@pytest.mark.parametrize(
    "weights", ["owner/name", "here/resnet50.pth", "resnet50.pth", "./DEFAULT", Path("DEFAULT"), "DEFAULT"]
)
def test_paths_hub_ids_and_a_folder_of_that_name_are_no_names(weights: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if weights == "DEFAULT":
        (tmp_path / "DEFAULT").mkdir()
    monkeypatch.setattr("zoo.resnet.convert.locate", lambda given: ("located", given))
    assert find_weights("resnet50", weights) == ("located", weights)


def test_checkpoints_of_training_scripts_load_and_a_model_without_memory_converts(tmp_path: Path) -> None:
    model = zoo.create("resnet-debug")
    # As old releases wrote them, without counters.
    state = zoo.to_upstream(model).state_dict()
    old = {key: tensor for key, tensor in state.items() if not key.endswith("num_batches_tracked")}
    torch.save({"state_dict": old}, tmp_path / "checkpoint.pth")
    loaded = zoo.create("resnet-debug", weights=tmp_path / "checkpoint.pth")
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="folded into the convolutions: .* load a model with norms"):
        zoo.create("resnet-debug", weights=tmp_path / "checkpoint.pth", folded=True)
    model = zoo.from_upstream(models.resnet18().to("meta"))
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_shards_of_two_saves_are_never_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoo.llm.save(zoo.create(PRESET), tmp_path, max_shard_size="50KB")
    replace, moved = Path.replace, []

    def die(file: Path, target: Path) -> Path:
        if len(moved) == 2:
            raise KeyboardInterrupt
        moved.append(target)
        return replace(file, target)

    with monkeypatch.context() as dying, pytest.raises(KeyboardInterrupt):
        dying.setattr(Path, "replace", die)
        zoo.llm.save(zoo.create(PRESET), tmp_path, max_shard_size="50KB")
    with pytest.raises(FileNotFoundError):
        zoo.llm.load(tmp_path)
    zoo.llm.save(zoo.create(PRESET), tmp_path, max_shard_size="50KB")
    zoo.llm.load(tmp_path)
