"""Encoders: BERT and RoBERTa over padded or packed batches, with the usual heads."""

from zoo.bert.convert import WEIGHTS
from zoo.bert.convert import load as load
from zoo.bert.convert import save as save
from zoo.bert.layer import BertConfig as BertConfig
from zoo.bert.layer import BertEmbeddings as BertEmbeddings
from zoo.bert.layer import BertLayer as BertLayer
from zoo.bert.layer import Encoding as Encoding
from zoo.bert.layer import MaskedLMHead as MaskedLMHead
from zoo.bert.layer import PoolerHead as PoolerHead
from zoo.bert.layer import Rows as Rows
from zoo.bert.layer import SequenceHead as SequenceHead
from zoo.bert.layer import SequenceScores as SequenceScores
from zoo.bert.layer import SpanHead as SpanHead
from zoo.bert.layer import Spans as Spans
from zoo.bert.layer import TokenHead as TokenHead
from zoo.bert.layer import TokenScores as TokenScores
from zoo.bert.layer import attend as attend
from zoo.bert.model import PRESETS, example_inputs
from zoo.bert.model import Bert as Bert
from zoo.bert.model import PackedBatch as PackedBatch
from zoo.bert.model import pack as pack
from zoo.bert.model import token_buckets as token_buckets
from zoo.bert.model import unpack as unpack
from zoo.registry import Family, register

register(Family(presets=PRESETS, example_inputs=example_inputs, upstream_packages=("transformers",), weights=WEIGHTS))
