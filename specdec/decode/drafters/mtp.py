"""MTP: the target's own head drafts a chain, a token a pass, each from the state of the last."""

from __future__ import annotations

from specdec.decode.drafters.base import DraftContext, make_net
from specdec.decode.drafters.eagle import PairDrafter
from specdec.decode.drafters.levels import DynamicTree
from specdec.decode.drafters.trees import check_num_tokens
from specdec.engine.decoder import Decoder
from specdec.engine.mtp import MtpNet
from specdec.methods.mtp import MtpOptions, MtpParams


def make_drafter(context: DraftContext) -> MtpDrafter:
    """Lay out the head, for chains as long as is asked for, or as the engine has room for."""
    params, decoder = context.params, context.decoder
    assert isinstance(params, MtpParams)
    head = decoder.lm_head if decoder.group is None and decoder.lm_head.bias is None else None
    net = make_net(MtpNet, context, params, params.max_draft_len, head)
    return MtpDrafter(net, decoder, context.options)


class MtpDrafter(PairDrafter):
    """Proposes a chain. Pairs are run again with the target's states once these are known."""

    net: MtpNet

    def __init__(self, net: MtpNet, decoder: Decoder, options: MtpOptions | None = None) -> None:
        super().__init__(net, decoder, None, "MTP")
        self.params = net.params
        max_tokens = self.params.max_draft_len
        num_tokens = options.num_tokens if options is not None else None
        num_tokens = max_tokens if num_tokens is None else num_tokens
        check_num_tokens("--mtp-num-draft-tokens", num_tokens, max_tokens, "--mtp-max-draft-len")
        self._use(DynamicTree(top_k=1, depth=num_tokens, num_tokens=num_tokens))
