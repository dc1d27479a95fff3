"""Paper 003: tables and figures of KVPR (Jiang et al. 2025), in order."""

from benchmarks.paper import kvpr_figures, kvpr_tables

ITEMS = (
    kvpr_tables.TABLE_1,
    kvpr_tables.TABLE_2,
    kvpr_tables.TABLE_3,
    kvpr_tables.TABLE_4,
    kvpr_tables.TABLE_5,
    kvpr_figures.FIGURE_6,
    kvpr_figures.FIGURE_7,
    kvpr_figures.FIGURE_8,
    kvpr_figures.FIGURE_9,
    kvpr_figures.FIGURE_10,
    kvpr_figures.FIGURE_12,
    kvpr_figures.FIGURE_13,
    kvpr_figures.FIGURE_14,
)
