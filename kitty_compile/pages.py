"""The page table that the layers of a device share, and the deal of free pages."""

import torch


class PageTable:
    """Page ids of every row, i32 [B, max_pages]; ``num_pages`` ids exist in each layer's pools.

    A slot below its row's sealed count names a sealed page, which rows may share. Every other slot names a free page that
    no other slot names, so that sealing never allocates.
    """

    def __init__(self) -> None:
        self.table = torch.zeros(0, 0, dtype=torch.int32)
        self.num_pages = 0

    @property
    def max_pages(self) -> int:
        return self.table.shape[1]

    @property
    def nbytes(self) -> int:
        return self.table.nbytes

    @torch.inference_mode(False)
    def allocate(self, batch: int, max_pages: int, device: torch.device) -> None:
        """Start over with ``batch`` rows of ``max_pages`` free pages."""
        self.num_pages = batch * max_pages
        self.table = torch.arange(self.num_pages, dtype=torch.int32, device=device).view(batch, max_pages)

    @torch.inference_mode(False)
    def release(self) -> None:
        self.table = self.table.new_zeros(0, 0)
        self.num_pages = 0

    @torch.inference_mode(False)
    def grow(self, max_pages: int) -> None:
        """Give every row new free slots, with new page ids."""
        batch, old = self.table.shape
        added = batch * (max_pages - old)
        new = torch.arange(self.num_pages, self.num_pages + added, dtype=torch.int32, device=self.table.device)
        self.table = torch.cat([self.table, new.view(batch, -1)], dim=1)
        self.num_pages += added

    @torch.inference_mode(False)
    def select(self, index: torch.Tensor) -> None:
        """Take rows by index. Pages must be dealt again afterwards, the pools grown first if rows were added."""
        selected = self.table.index_select(0, index)
        self.table = self.table.copy_(selected) if selected.shape == self.table.shape else selected
        self.num_pages = max(self.num_pages, self.table.numel())

    def deal(self, sealed: torch.Tensor) -> None:
        """Give every slot at or past its row's ``sealed`` [B] pages a private free page, without asking the host.

        Ids in use are marked and sorted behind the free ones; the k-th unsealed slot gets the k-th free id.
        """
        slot = torch.arange(self.max_pages, device=self.table.device)
        is_sealed = slot < sealed.unsqueeze(1)
        in_use = torch.zeros(self.num_pages + 1, dtype=torch.int32, device=self.table.device)
        in_use[torch.where(is_sealed, self.table, self.num_pages).flatten().long()] = 1
        free = torch.argsort(in_use[: self.num_pages], stable=True).to(torch.int32)
        rank = (~is_sealed).flatten().cumsum(0) - 1
        self.table.copy_(torch.where(is_sealed, self.table, free[rank.clamp(min=0)].view_as(self.table)))

    def pages_in_use(self, sealed: torch.Tensor) -> int:
        """Distinct sealed pages."""
        slot = torch.arange(self.max_pages, device=self.table.device)
        return int(self.table[slot < sealed.unsqueeze(1)].unique().numel())
