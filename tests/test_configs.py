"""Configs that make no sense are refused, with the wrong value."""

from typing import Any

import pytest

import zoo

BASIC = {"block": "basic", "width_per_group": 64}
BAD: dict[str, list[tuple[dict[str, Any], str]]] = {
    "bert-debug": [
        ({"hidden_size": 33}, "hidden_size is 33 and num_attention_heads is 4"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive integer"),
        ({"head": "qa"}, "head is 'qa', expected one of"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu', expected one of"),
        ({"kind": "albert"}, "kind is 'albert'"),
        ({"problem_type": "ranking"}, "problem_type is 'ranking'"),
        ({"hidden_dropout_prob": 1.0}, "hidden_dropout_prob is 1.0"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0"),
        ({"pad_token_id": 128}, "pad_token_id is 128, but vocab_size is 128"),
        ({"kind": "roberta", "pad_token_id": None}, "kind 'roberta' counts positions by it"),
        ({"kind": "roberta", "pad_token_id": 63}, "max_position_embeddings is 64, but positions start later"),
        ({"head": "question-answering", "num_labels": 3}, "num_labels is 3, but an answer has 2"),
    ],
    "llm-debug": [
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "must be a multiple"),
        ({"head_dim": 15}, "must be even"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"pad_token_id": 256}, "pad_token_id is 256"),
    ],
    "resnet-debug": [
        ({"block": "plain"}, "block is 'plain', expected one of 'basic', 'bottleneck'"),
        ({"layers": (1, 2, 3)}, "four positive numbers"),
        ({"layers": (1, 2, 0, 1)}, "four positive numbers"),
        ({"num_classes": 0}, "num_classes is 0"),
        ({"groups": True}, "groups is True"),
        ({"replace_stride_with_dilation": (True,)}, "three flags"),
        ({"norm": "layer"}, "norm is 'layer', expected one of 'batch', 'frozen'"),
        ({"norm_momentum": None}, "norm_momentum is None"),
        ({"block": "basic"}, "width_per_group 16: use bottlenecks"),
        (BASIC | {"layers": (1, 1, 2, 1), "replace_stride_with_dilation": (0, 1, 0)}, "basic blocks cannot be dilated"),
    ],
    "unet-debug": [
        ({"in_channels": 0}, "in_channels is 0, expected a positive integer"),
        ({"block_out_channels": (16, 32)}, "layers_per_block is .* for each of 2 levels"),
        ({"block_out_channels": (16, 32, 36)}, "norm_num_groups is 8, which does not divide"),
        ({"num_attention_heads": 5}, "num_attention_heads has 5, which does not divide 16"),
        ({"num_attention_heads": (2, 2)}, r"num_attention_heads is \(2, 2\), expected .* 3 levels"),
        ({"down_block_types": ("DownBlock2D",) * 2}, "expected DownBlock2D or Cross.* each of 3 levels"),
        ({"up_block_types": ("KUpBlock2D",) * 3}, r"up_block_types is \('KUpBlock2D', .*, expected UpBlock2D or Cross"),
        ({"layers_per_block": (1, 2)}, r"layers_per_block is \(1, 2\), expected a positive integer"),
        ({"addition_embed_type": "text"}, "addition_embed_type is 'text', expected one of None, 'text_time'"),
        ({"addition_embed_type": "text_time"}, "addition_time_embed_dim is None, expected a pos"),
        ({"transformer_layers_per_block": (1, 2)}, "expected a positive integer for each of 3 levels"),
        ({"transformer_layers_per_block": [[1], [2], 1]}, r"is \(\[1\], \[2\], 1\), expected a positive integer"),
    ],
    "gcn-debug": [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"hidden_channels": True}, "hidden_channels is True"),
        ({"jk": "lstm"}, "jk is 'lstm'"),
        ({"dropout": 1.5}, r"dropout is 1\.5"),
        ({"normalize": False, "add_self_loops": True}, "add_self_loops is True and normalize False"),
        ({"act": "nope"}, "act is 'nope'"),
        ({"act": "elu", "act_kwargs": {"beta": 1}}, "act_kwargs is .*, which elu does not take"),
        ({"norm": "nope"}, "norm is 'nope'"),
        ({"norm": "layer", "norm_kwargs": {"mode": "edge"}}, "mode='edge'"),
    ],
    "gat-debug": [
        ({"hidden_channels": 6, "heads": 4}, "heads is 4, which does not divide hidden_channels 6"),
        ({"heads": 0}, "heads is 0"),
    ],
    "graphsage-debug": [({"aggr": "median"}, "aggr is 'median'")],
}


@pytest.mark.parametrize(
    ("name", "changes", "words"), [(name, *case) for name, cases in BAD.items() for case in cases], ids=str
)
def test_bad_configs_are_named(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        zoo.create(name, **changes)
