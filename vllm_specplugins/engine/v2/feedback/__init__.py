"""Model Runner V2: counts drafts and their outcomes on the device. The host reads the counts one step later."""
