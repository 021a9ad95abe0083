import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kitty_compile.pages import PageTable


def sealed_ids(table, sealed):
    return [row[:count].tolist() for row, count in zip(table.table, sealed, strict=True)]


def check(table, sealed):
    """Every unsealed slot names a page of its own that no row has sealed."""
    counts = sealed.tolist()
    in_use = {page for row in sealed_ids(table, counts) for page in row}
    free = [page for row, count in zip(table.table.tolist(), counts, strict=True) for page in row[count:]]
    assert len(set(free)) == len(free)
    assert not in_use & set(free)
    assert all(0 <= page < table.num_pages for page in (*in_use, *free))
    assert table.pages_in_use(sealed) == len(in_use)


def allocated(batch, max_pages):
    table = PageTable()
    table.allocate(batch, max_pages, torch.device("cpu"))
    return table


def test_a_new_table_is_all_free():
    table = allocated(3, 4)
    assert (table.num_pages, table.max_pages, table.nbytes) == (12, 4, 48)
    check(table, torch.zeros(3, dtype=torch.int64))


def test_growing_keeps_every_id():
    table = allocated(2, 2)
    before = table.table.clone()
    table.grow(5)
    assert torch.equal(table.table[:, :2], before)
    assert table.num_pages == 10
    check(table, torch.tensor([2, 1]))


def test_selecting_the_same_number_of_rows_keeps_the_address():
    table = allocated(3, 2)
    address = table.table.data_ptr()
    table.select(torch.tensor([2, 2, 0]))
    assert table.table.data_ptr() == address


def test_reorder_without_a_deal_would_share_free_pages():
    table, sealed = allocated(2, 3), torch.tensor([1, 1])
    table.select(torch.tensor([0, 0]))
    assert len(table.table.unique()) == 3
    table.deal(sealed)
    check(table, sealed)
    assert sealed_ids(table, [1, 1]) == [[0], [0]]


def test_release_forgets_everything():
    table = allocated(2, 3)
    table.release()
    assert (table.num_pages, table.max_pages, table.nbytes) == (0, 0, 0)


@st.composite
def histories(draw):
    batch, max_pages = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    return (
        batch,
        max_pages,
        draw(st.lists(st.tuples(st.sampled_from("srg"), st.randoms(use_true_random=False)), max_size=12)),
    )


@settings(max_examples=60)
@given(histories())
def test_sealed_ids_survive_and_free_ones_stay_private(history):
    batch, max_pages, steps = history
    table, sealed = allocated(batch, max_pages), torch.zeros(batch, dtype=torch.int64)
    for step, random in steps:
        if step == "s":  # seal or crop
            sealed = torch.tensor([random.randint(0, table.max_pages) for _ in sealed])
            kept = sealed_ids(table, sealed.tolist())
        elif step == "r":
            index = [random.randrange(len(sealed)) for _ in range(random.randint(1, 5))]
            kept = [sealed_ids(table, sealed.tolist())[row] for row in index]
            sealed = sealed[index]
            table.select(torch.tensor(index))
        else:
            kept = sealed_ids(table, sealed.tolist())
            table.grow(table.max_pages + random.randint(0, 2))
        table.deal(sealed)
        check(table, sealed)
        assert sealed_ids(table, sealed.tolist()) == kept
