"""Number formats and precision plans. This package imports no torch.

`get(name)` finds a format. `Format`, `BlockFormat`, `Plan` and `ModulePlan` are records. The constants are the
catalogue.
"""

from plimsoll import exports
from plimsoll.formats.catalogue import (
    ALIASES as ALIASES,
    BF16 as BF16,
    BLOCKS as BLOCKS,
    E2M1 as E2M1,
    E2M3 as E2M3,
    E3M2 as E3M2,
    E4M3 as E4M3,
    E4M3FNUZ as E4M3FNUZ,
    E5M2 as E5M2,
    E5M2FNUZ as E5M2FNUZ,
    E8M0 as E8M0,
    ELEMENTS as ELEMENTS,
    FP16 as FP16,
    FP32 as FP32,
    FP64 as FP64,
    MXFP4 as MXFP4,
    MXFP6_E2M3 as MXFP6_E2M3,
    MXFP6_E3M2 as MXFP6_E3M2,
    MXFP8_E4M3 as MXFP8_E4M3,
    MXFP8_E5M2 as MXFP8_E5M2,
    NVFP4 as NVFP4,
    NVFP4_SINGLE as NVFP4_SINGLE,
    TF32 as TF32,
    get as get,
    get_element as get_element,
)
from plimsoll.formats.precision_plan import ROLES as ROLES, ModulePlan as ModulePlan, Plan as Plan, Role as Role
from plimsoll.formats.records import BlockFormat as BlockFormat, Format as Format, Specials as Specials

exports.show_classes(__name__)
