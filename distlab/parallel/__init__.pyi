"""Names of `distlab.parallel` for editors and the documentation, which do not run `__getattr__`."""

from distlab.parallel.bucketed import BucketedDDP as BucketedDDP
from distlab.parallel.build import Strategy as Strategy
from distlab.parallel.build import Wrapping as Wrapping
from distlab.parallel.copy_engine import CopyEngineDDP as CopyEngineDDP
from distlab.parallel.ddp import DataParallel as DataParallel
from distlab.parallel.flat import FlatDDP as FlatDDP
from distlab.parallel.fsdp.fsdp import FSDP as FSDP
from distlab.parallel.layout import Layout as Layout
from distlab.parallel.local import Local as Local
from distlab.parallel.local_optimizer import LocalOptimizer as LocalOptimizer
from distlab.parallel.local_optimizer import stepped as stepped
from distlab.parallel.model import ParallelModel as ParallelModel
from distlab.parallel.naive import NaiveDDP as NaiveDDP
from distlab.parallel.overlap import OverlapDDP as OverlapDDP
from distlab.parallel.registry import STRATEGIES as STRATEGIES
from distlab.parallel.registry import check_buckets as check_buckets
from distlab.parallel.registry import check_reshard as check_reshard
from distlab.parallel.registry import check_shard_size as check_shard_size
from distlab.parallel.registry import get_strategy as get_strategy
from distlab.parallel.registry import strategies_on as strategies_on
from distlab.parallel.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from distlab.parallel.torch_peers import TorchDDP as TorchDDP
from distlab.parallel.torch_peers import TorchFSDP2 as TorchFSDP2
from distlab.parallel.zero import ZeroOptimizer as ZeroOptimizer
