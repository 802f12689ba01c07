"""What people read: text, pages and pictures, made from what `core.check` computed."""
